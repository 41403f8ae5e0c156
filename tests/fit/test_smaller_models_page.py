"""The programs of the page on smaller models run, and quantization-aware training keeps the promises."""

import re

import numpy as np
import pytest
import torch

import lumen
from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.pages import snippets
from tests.helpers.quantizing import Quantized, quantized
from tests.helpers.workplace import LINE as CONFIG  # noqa: F401

PAGE = "docs/smaller-models.md"


def test_the_programs_of_the_page_print_what_it_is_about(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = []
    for number, program in enumerate(snippets(PAGE)):
        exec(compile(program, f"{PAGE}, program {number}", "exec"), {"__name__": "page"})
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said == ["65.7% of the weights are 0", "IntxUnpackedToInt8Tensor differs by 0.0"]


def test_pruning_is_named_on_the_command_line(workplace):
    words = re.search(r"`(--trainer\.callbacks\+=ModelPruning\s[^`]*)`", (ROOT / PAGE).read_text())[1]
    assert main(["fit", "--config", "line.yaml", *words.replace("net.0.weight", "layer.weight").split()]) == 0
    (pruning,) = (each for each in Spy.trainer.callbacks if isinstance(each, lumen.ModelPruning))
    assert pruning.parameters_to_prune == ["layer.weight"]


@pytest.mark.parametrize("cut", [3, 5])
def test_a_quantized_run_in_two_parts_ends_with_the_bits_of_a_whole_one(tmp_path, cut):
    whole = quantized(tmp_path / "whole")
    quantized(tmp_path / "parts", steps=cut)
    parts = quantized(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def test_it_is_the_loop_by_hand_and_begins_with_weights_of_a_run_without_it(tmp_path):
    ours = quantized(tmp_path)
    task = Quantized()
    optimizer = task.configure_optimizers()
    for _ in range(2):
        for batch in Quantized.batches():
            optimizer.zero_grad()
            task.training_step(batch).backward()
            optimizer.step()
    assert all(np.array_equal(ours[name], each.detach().numpy()) for name, each in task.named_parameters())
    plain = Quantized(few_bits=False)
    assert [name for name, _ in plain.named_parameters()] == [*ours]
    with torch.no_grad():
        inputs = torch.randn(4, 32)
        assert not torch.equal(plain.net(inputs), Quantized().net(inputs))  # the same weights in few bits
