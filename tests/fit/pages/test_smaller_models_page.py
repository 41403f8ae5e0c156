"""Programs of the page on smaller models: each one runs, and quantization-aware training keeps the promises."""

import numpy as np
import pytest
import torch

import lumen
from tests.helpers.pages import find_programs, run_programs
from tests.helpers.quantization import Quantized, train_quantized

PAGE = "docs/guides/smaller-models.md"


def test_programs_of_the_page_print_expected_values(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = [capsys.readouterr().out.splitlines()[-1] for _ in run_programs(PAGE)]
    assert said == ["65.7% of the weights are 0", "IntxUnpackedToInt8Tensor differs by 0.0"]


@pytest.mark.parametrize("cut", [20, 48, 53])
def test_pruning_of_the_page_resumes_exactly(tmp_path, monkeypatch, cut):
    program, _ = find_programs(PAGE)
    page = {"__name__": "page"}
    exec(program.split("trainer = ")[0], page)

    def trained(name, **settings):
        monkeypatch.chdir(tmp_path)
        lumen.seed_everything(1)
        task = page["Classifier"]()
        lumen.Trainer(seed=1, name=name, resume="auto", **settings).fit(task, page["data"])
        return task.state_dict()

    whole = trained("whole", max_epochs=5)
    epochs = min(cut // 16, 3)  # an epoch in which a run ends is not pruned
    kept = torch.cat([trained("parts", max_steps=cut)[f"net.{layer}.weight_mask"].flatten() for layer in (0, 2)])
    assert kept.mean().item() == pytest.approx(0.7**epochs, abs=1e-3)
    parts = trained("parts", max_epochs=5)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not whole["net.0.weight_mask"].all()


def test_model_pruning_is_refused_with_what_to_write():
    with pytest.raises(AttributeError, match=r"'ModelPruning'\. Call torch.nn.utils.prune in the task"):
        _ = lumen.ModelPruning
    assert not hasattr(lumen, "Prunning")


@pytest.mark.parametrize("cut", [3, 5])
def test_resumed_quantized_run_equals_uninterrupted_run(tmp_path, cut):
    whole = train_quantized(tmp_path / "whole")
    train_quantized(tmp_path / "parts", steps=cut)
    parts = train_quantized(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def test_quantized_training_equals_manual_loop_and_keeps_names(tmp_path):
    ours = train_quantized(tmp_path)
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
        assert not torch.equal(plain.net(inputs), Quantized().net(inputs))  # the same weights, quantized
