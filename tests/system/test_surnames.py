"""Example GRU: it never reads padding, and it learns the origin of names."""

import json

import pytest
import torch
from torch.nn import functional as F

from datamodules.surnames import pad
from models.surnames import SurnameGRU
from tests.helpers.cli import run_model

ORIGINS = ["Here", "There", "Elsewhere"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return SurnameGRU(ORIGINS).eval()


def test_padding_does_not_change_the_logits(model):
    names = ["Ek", "Hundertwasser", "Šimková", "van der Berg"]
    together = model(*pad(names))
    for name, logits in zip(names, together, strict=True):
        torch.testing.assert_close(model(*pad([name]))[0], logits)


def test_what_stands_in_the_padding_does_not_matter(model):
    letters, lengths = pad(["Ek", "Hundertwasser"])
    scribbled = letters.masked_fill(letters == 0, ord("x"))
    assert not torch.equal(scribbled, letters)
    assert torch.equal(model(scribbled, lengths), model(letters, lengths))


def test_every_letter_of_a_name_counts(model):
    (letters,), (length,) = pad(["Šimková"])
    before = model(letters[None], [length])
    for position in range(length):
        changed = letters.clone()
        changed[position] = ord("x")
        assert not torch.equal(model(changed[None], [length]), before)


def test_the_loss_is_the_mean_over_names(model):
    names, labels = ["Ek", "Hundertwasser", "Šimková"], torch.tensor([0, 2, 1])
    each = [F.cross_entropy(model(*pad([name])), labels[[i]]) for i, name in enumerate(names)]
    torch.testing.assert_close(model.training_step((*pad(names), labels)), torch.stack(each).mean())


def test_prediction_has_name_origin_and_probability(model):
    batch = pad(["Ek", "Šimková"])
    likelihoods = model(*batch).softmax(-1)
    for line, name, row in zip(model.predict_step(batch), ["Ek", "Šimková"], likelihoods.tolist(), strict=True):
        assert line.split() == [name, ORIGINS[row.index(max(row))], f"{max(row):.0%}"]


def best_accuracy(tmp_path):
    run_model("validate", "surnames", tmp_path, "--ckpt_path=best", f"--output={tmp_path}/values.json")
    return json.loads((tmp_path / "values.json").read_text())[0]["val_acc"]


def test_three_epochs_classify_three_of_four_names(tmp_path, capsys):
    run_model("fit", "surnames", tmp_path, "--trainer.max_epochs=3")
    assert best_accuracy(tmp_path) >= 0.75
    capsys.readouterr()
    run_model("predict", "surnames", tmp_path, "--ckpt_path=best", "--data.names", "[Virtanen, Dvořáková]")
    finnish, slovak = capsys.readouterr().out.splitlines()
    assert finnish.split()[:2] == ["Virtanen", "Finnish"]
    assert slovak.split()[:2] == ["Dvořáková", "Slovak"]


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_config_classifies_four_of_five_and_stops_early(tmp_path):
    run_model("fit", "surnames", tmp_path)
    assert best_accuracy(tmp_path) >= 0.80
    assert "finished: stopped early" in (tmp_path / "surnames/run.log").read_text()
