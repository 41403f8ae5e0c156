"""Example networks for tables: the scale is part of the model, and they learn."""

import json

import pytest
import torch
from sklearn.metrics import r2_score, roc_auc_score
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lumen
from datamodules.tabular import Tabular
from models.tabular import Classifier, Regressor, Standardize
from tests.helpers.cli import run_model


@pytest.fixture(scope="module")
def trained_directory(tmp_path_factory):
    """Train both configs; return the directory and the tests of the best checkpoints."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for name in ("breast_cancer", "diabetes"):
        run_model("fit", name, root)
        run_model("test", name, root, "--ckpt_path=best", f"--output={root / name}.json")
        found[name] = json.loads((root / f"{name}.json").read_text())[0]
    return root, found


def held_out(table):
    data = Tabular(table)
    data.setup("test")
    return data.test[:]


def test_standardize_uses_statistics_of_fitted_rows():
    rows = torch.randn(50, 3) * torch.tensor([1.0, 100.0, 0.01]) + torch.tensor([5.0, -300.0, 0.0])
    scale = Standardize(3)
    assert torch.equal(scale(rows), rows)
    scale.fit(rows)
    torch.testing.assert_close(scale(rows).mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(scale(rows).std(0), torch.ones(3))
    torch.testing.assert_close(scale.inverse(scale(rows)), rows)


def test_config_classifies_94_percent_of_test_biopsies(trained_directory):
    _, found = trained_directory
    assert found["breast_cancer"]["test_acc"] >= 0.94
    assert found["breast_cancer"]["test_auroc"] >= 0.98


def test_config_explains_30_percent_of_test_variance(trained_directory):
    _, found = trained_directory
    assert found["diabetes"]["test_r2"] >= 0.30


def test_metrics_of_test_cover_all_rows(trained_directory):
    root, found = trained_directory
    rows, labels = held_out("breast_cancer")
    logits = load_best(Classifier(30), "breast_cancer", root)(rows)
    expected = {
        "test_loss": F.binary_cross_entropy_with_logits(logits, labels).item(),
        "test_acc": ((logits > 0) == labels.bool()).double().mean().item(),
        "test_auroc": roc_auc_score(labels, logits),
    }
    assert found["breast_cancer"] == pytest.approx(expected, rel=1e-5)
    rows, targets = held_out("diabetes")
    guesses = load_best(Regressor(10), "diabetes", root)(rows)
    expected = {"test_r2": r2_score(targets, guesses), "test_error": (guesses - targets).abs().mean().item()}
    assert found["diabetes"] == pytest.approx(expected, rel=1e-5)


def load_best(model, name, root):
    """Return the model with the best checkpoint's parameters and buffers, without its training data."""
    trainer = lumen.Trainer(default_root_dir=root, name=name, enable_progress_bar=False, log_level="ERROR")
    trainer.predict(model, DataLoader(TensorDataset(*held_out(name))), ckpt_path="best")
    return model.eval().requires_grad_(False)


def test_saved_scale_uses_training_rows_only(trained_directory):
    root, _ = trained_directory
    data = Tabular("diabetes")
    data.setup("fit")
    rows, targets = data.train[:]
    model = load_best(Regressor(10), "diabetes", root)
    assert torch.equal(model.scale.mean, rows.mean(0))
    assert torch.equal(model.scale.std, rows.std(0))
    assert torch.equal(model.target_scale.mean, targets.mean())
    assert not torch.allclose(model.scale.mean, data.rows.tensors[0].mean(0))


def test_predictions_are_for_people(trained_directory, capsys):
    root, _ = trained_directory
    rows, labels = held_out("breast_cancer")
    run_model("predict", "breast_cancer", root, "--ckpt_path=best")
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(", ")[2] for line in lines] == ["yes" if label else "no" for label in labels]
    likelihoods = load_best(Classifier(30), "breast_cancer", root)(rows).sigmoid()
    assert [line.partition("%")[0].split()[-1] for line in lines] == [f"{100 * p:.1f}" for p in likelihoods]


def test_regression_predictions_are_in_original_units(trained_directory, capsys):
    root, _ = trained_directory
    rows, targets = held_out("diabetes")
    run_model("predict", "diabetes", root, "--ckpt_path=best")
    found = [line.split(", was ") for line in capsys.readouterr().out.splitlines()]
    assert [float(was) for _, was in found] == targets.tolist()
    guesses = load_best(Regressor(10), "diabetes", root)(rows)
    assert [float(guess) for guess, _ in found] == pytest.approx(guesses.tolist(), abs=0.51)
