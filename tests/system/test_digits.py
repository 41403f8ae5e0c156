"""Example CNN: its size, its metric, and its learning in several ways."""

import json

import pytest
import torch
from torch.nn import functional as F

import lumen
from datamodules.mnist import MNIST5k
from models.digits import DigitsCNN
from models.digits_finetune import FineTunedCNN
from tests.helpers.cli import run_model
from tests.helpers.tables import read_rows


def make_batch(n):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(n, 1, 28, 28, generator=generator), torch.randint(10, (n,), generator=generator)]


def test_the_network_has_207_thousand_parameters():
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in DigitsCNN().parameters()) == 206_922


def test_the_loss_is_the_mean_over_images():
    model, (images, labels) = DigitsCNN().eval(), make_batch(5)
    likelihood = model(images).softmax(-1)[torch.arange(5), labels]
    torch.testing.assert_close(model.training_step([images, labels]), -likelihood.log().mean())


def test_predictions_are_the_likeliest_digits():
    model, batch = DigitsCNN().eval(), make_batch(5)
    digits = model.predict_step(batch)
    assert digits.shape == (5,)
    assert digits.tolist() == [max(range(10), key=row.__getitem__) for row in model(batch[0]).tolist()]


def test_logged_accuracy_covers_all_images(tmp_path):
    data, model = MNIST5k(batch_size=96), DigitsCNN()
    trainer = lumen.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, log_level="ERROR")
    (metrics,) = trainer.validate(model, data)
    images, labels = data.val[:]
    logits = model.eval()(images)
    assert metrics["val_acc"] == pytest.approx((logits.argmax(-1) == labels).double().mean().item(), abs=1e-6)
    assert metrics["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def read_logged(root, name, value):
    """Return every value of a name in metrics.csv, in order."""
    return [float(row[value]) for row in read_rows(root / name / "metrics.csv") if row[value]]


@pytest.fixture(scope="module")
def trained_directory(tmp_path_factory):
    """Train models/digits.yaml; return the directory."""
    root = tmp_path_factory.mktemp("runs")
    run_model("fit", "digits", root)
    return root


@pytest.mark.slow
def test_the_config_reads_94_percent_of_the_digits(trained_directory):
    data, trainer = MNIST5k(), lumen.Trainer(default_root_dir=trained_directory, name="digits")
    predicted = torch.cat(trainer.predict(DigitsCNN(), data, ckpt_path="best"))
    _, labels = data.val[:]
    assert (predicted == labels).double().mean() >= 0.94


def test_moving_the_images_needs_no_seed_to_repeat(tmp_path):
    trained = []
    for workers in (0, 2):
        torch.manual_seed(0)
        model, data = DigitsCNN(), MNIST5k(shift=3, num_workers=workers)
        lumen.Trainer(max_steps=4, limit_val_batches=0, seed=3, default_root_dir=tmp_path).fit(model, data)
        trained.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*trained)


# -------------------------------------------------------------------- learning until a plateau


def test_plateau_run_warms_up_decays_and_stops(tmp_path):
    """The loss counts as falling only if it falls by 10, on little data."""
    run_model("fit", "digits_plateau", tmp_path, "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1",
        "--trainer.log_every_n_steps=1", "--lr_schedule.warmup_steps=4", "--lr_scheduler.threshold_mode=abs",
        "--lr_scheduler.threshold=10", "--trainer.callbacks.stop.min_delta=10")  # fmt: skip
    rates = [0.0, 0.0005, 0.001, 0.0015] + 4 * [0.002] + 4 * [0.002] + 4 * [0.0004] + 4 * [0.0004]
    assert read_logged(tmp_path, "digits_plateau", "lr/decay") == pytest.approx(rates)
    assert "finished: stopped early at step 20" in (tmp_path / "digits_plateau/run.log").read_text()


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_plateau_config_reaches_96_percent_and_stops_early(tmp_path):
    run_model("fit", "digits_plateau", tmp_path)
    run_model("validate", "digits_plateau", tmp_path, "--ckpt_path=best", f"--output={tmp_path}/values.json")
    assert json.loads((tmp_path / "values.json").read_text())[0]["val_acc"] >= 0.96
    assert read_logged(tmp_path, "digits_plateau", "lr/decay")[-1] < 0.001
    assert "finished: stopped early" in (tmp_path / "digits_plateau/run.log").read_text()


# -------------------------------------------------------------------- tricks of DDP


def test_nesterov_run_warms_up_decays_and_stops(tmp_path):
    """The loss counts as falling only if it falls by 10, on little data."""
    run_model("fit", "digits_ddp", tmp_path, "--trainer.limit_train_batches=8", "--trainer.limit_val_batches=1",
        "--trainer.log_every_n_steps=1", "--lr_schedule.warmup_epochs=1", "--lr_scheduler.threshold_mode=abs",
        "--lr_scheduler.threshold=10", "--trainer.callbacks.stop.min_delta=10")  # fmt: skip
    rates = 4 * [0.005] + 4 * [0.05] + 4 * [0.05] + 4 * [0.01] + 4 * [0.01]
    assert read_logged(tmp_path, "digits_ddp", "lr/decay") == pytest.approx(rates)
    assert "finished: stopped early at step 20" in (tmp_path / "digits_ddp/run.log").read_text()


def test_optimizer_is_nesterov_inside_lookahead(tmp_path):
    run_model("fit", "digits_ddp", tmp_path, "--trainer.max_steps=1")
    state = next((tmp_path / "digits_ddp/checkpoints").glob("*/state.json")).read_text()
    assert "Lookahead(SGD)" in state
    assert '"nesterov": true' in state


# -------------------------------------------------------------------- fine-tuning


@pytest.fixture(scope="module")
def tuned_directory(trained_directory):
    """Fine-tune the trained network; return the directory."""
    run_model("fit", "digits_finetune", trained_directory, f"--trainer.init_from={trained_directory / 'digits'}")
    return trained_directory


@pytest.mark.slow
def test_finetuning_reads_nine_of_ten_scans(tuned_directory):
    """Fine-tuning on 100 labelled images must exceed 75 %, the most without it."""
    run_model(
        "validate",
        "digits",
        tuned_directory,
        "--data=datamodules.scans.Scans",
        "--ckpt_path=last",
        f"--output={tuned_directory}/v.json",
    )
    assert json.loads((tuned_directory / "v.json").read_text())[0]["val_acc"] <= 0.75
    assert read_logged(tuned_directory, "digits_finetune", "val_acc")[-1] >= 0.90


@pytest.mark.slow
def test_finetuning_changes_all_but_first_layer(tuned_directory):
    before = DigitsCNN.load_from_checkpoint(tuned_directory / "digits").state_dict()
    after = FineTunedCNN.load_from_checkpoint(tuned_directory / "digits_finetune").state_dict()
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in same if name.startswith("net.")} == {"net.0.weight", "net.0.bias"}


@pytest.mark.slow
def test_layer_rates_halve_downwards_and_decay(tuned_directory):
    layers = ("net.3", "net.7", "head")
    lowest, middle, highest = (read_logged(tuned_directory, "digits_finetune", f"lr/{layer} decay") for layer in layers)
    assert lowest == pytest.approx([rate / 2 for rate in middle])
    assert middle == pytest.approx([rate / 2 for rate in highest])
    assert highest == pytest.approx([1e-3 * (1 - (step - 1) / 140) for step in range(7, 141, 7)])


@pytest.mark.slow
def test_predictions_show_labels_and_accuracy(tuned_directory, capsys):
    run_model(
        "predict", "digits_finetune", tuned_directory, "--ckpt_path=last", f"--output={tuned_directory}/digits.jsonl"
    )
    rows = [json.loads(line) for line in (tuned_directory / "digits.jsonl").read_text().splitlines()]
    right = sum(row["predicted"] == row["label"] for row in rows) / len(rows)
    assert len(rows) == 1697
    assert right == pytest.approx(read_logged(tuned_directory, "digits_finetune", "val_acc")[-1])
    sample = [f"predicted {row['predicted']}, label {row['label']}" for row in rows[:10]]
    shown = capsys.readouterr()
    assert shown.out.splitlines() == sample
    assert f"accuracy {right:.1%}\n" in shown.err
