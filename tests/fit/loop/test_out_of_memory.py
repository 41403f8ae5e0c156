"""Evaluation batches that do not fit into memory: the evaluation continues, and its results are unchanged."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanSquaredError

import lumen
from lumen.errors import ConfigError, DataError
from tests.helpers.tasks import bare_trainer, loader, quiet_trainer, regression_data
from tests.helpers.validation import Cramped


class Notes(lumen.Callback):
    """Callback that records the arguments of the hooks around evaluation batches."""

    def __init__(self):
        self.seen = []

    def on_validation_batch_start(self, trainer, task, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("start", batch_idx, len(batch[0])))

    def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("end", batch_idx, len(batch[0]), trainer.run.log.batch_samples, outputs))


class Measured(Cramped):
    """Task that logs by every reduction and by metrics, before and after the point at which memory ends."""

    def __init__(self, fits):
        super().__init__(fits)
        self.error, self.all = MeanSquaredError(), CatMetric()

    def validation_step(self, batch):
        inputs, targets = batch
        self.all.update(targets)
        self.log("early", inputs.mean(), on_step=True)
        predicted = self(inputs)
        loss = nn.functional.mse_loss(predicted, targets)
        self.error(predicted, targets)
        self.log("mse", self.error)
        self.log("loss", loss)
        for reduction in ("sum", "min", "max"):
            self.log(reduction, loss, reduce_fx=reduction)
        self.require(inputs)
        self.log("late", loss)
        return {"loss": loss, "predicted": predicted, "names": [f"{value:.3f}" for value in targets[:, 0]]}

    def on_validation_epoch_end(self):
        self.log("kept", float(self.all.compute().sum()))
        self.log("updates", float(self.all._update_count))
        self.all.reset()


def make_data(batch_size, samples=50):
    return loader(samples, batch_size, shuffle=False, dtype=torch.float64)


def test_halved_validation_equals_batches_that_fit(tmp_path):
    """50 = 3 * 16 + 2: each batch of 16 becomes four of 4."""
    values = []
    for fits, batch_size, options in ((4, 16, {"halve_on_oom": True}), (4, 4, {}), (4, 4, {"halve_on_oom": True})):
        values.append(
            bare_trainer(tmp_path, precision="fp64", **options).validate(Measured(fits), make_data(batch_size))
        )
    assert values[0] == values[1] == values[2]
    assert values[0][0]["updates"] == 13


def test_hooks_see_the_whole_batch_once(tmp_path):
    notes, whole = Notes(), Notes()
    bare_trainer(tmp_path, precision="fp64", halve_on_oom=True, callbacks=notes).validate(
        Measured(3), make_data(16, 20)
    )
    bare_trainer(tmp_path, precision="fp64", callbacks=whole).validate(Measured(16), make_data(16, 20))
    assert [each[:4] for each in notes.seen] == [
        ("start", 0, 16), ("end", 0, 16, 16), ("start", 1, 4), ("end", 1, 4, 4)
    ]  # fmt: skip
    for halved, alone in zip(notes.seen[1::2], whole.seen[1::2], strict=True):
        torch.testing.assert_close(halved[-1]["predicted"], alone[-1]["predicted"], rtol=1e-12, atol=0)
        torch.testing.assert_close(halved[-1]["loss"], alone[-1]["loss"], rtol=1e-12, atol=0)
        assert halved[-1]["names"] == alone[-1]["names"]


def test_logged_step_values_cover_the_whole_batch(tmp_path):
    rows = []
    for name, fits in (("halves", 3), ("whole", 16)):
        trainer = quiet_trainer(tmp_path / name, precision="fp64", halve_on_oom=True, max_steps=1, val_check_interval=1)
        task = Measured(fits)
        trainer.fit(task, make_data(16), make_data(16, 20))
        lines = (tmp_path / name / "runs/run/metrics.csv").read_text().splitlines()
        found = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
        rows.append([float(row["early_step"]) for row in found if row.get("early_step")])
    assert rows[0] == pytest.approx(rows[1], rel=1e-12)
    assert len(rows[0]) == 2


class Drawn(Cramped):
    def validation_step(self, batch):
        self.log("drawn", torch.rand(len(batch[0]), dtype=torch.float64).mean(), on_step=True)
        self.require(batch[0])


def test_halved_draws_are_repeatable_and_isolated(tmp_path):
    def values(fits, limit):
        class Rows(lumen.Callback):
            def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
                drawn.append(torch.rand(()).item() if len(batch[0]) <= fits else None)

        drawn = []
        trainer = bare_trainer(tmp_path, halve_on_oom=True, callbacks=Rows(), limit_val_batches=limit)
        return trainer.validate(Drawn(fits), make_data(16, 20)), drawn

    first, again, whole = values(5, None), values(5, None), values(16, None)
    assert first == again
    assert first[1][1] == whole[1][1]  # in the batch of 4
    assert first[0] != values(5, 1)[0]


class Attempts(Cramped):
    """Task that records the draws of each attempt."""

    def validation_step(self, batch):
        self.drawn = [*getattr(self, "drawn", ()), (len(batch[0]), torch.rand(()).item())]
        self.require(batch[0])


def test_the_first_half_draws_what_the_attempt_drew(tmp_path):
    task = Attempts(4)
    bare_trainer(tmp_path, halve_on_oom=True).validate(task, make_data(16, 16))
    sizes, numbers = zip(*task.drawn, strict=True)
    assert sizes == (16, 8, 4, 4, 4, 4)
    assert numbers[0] == numbers[1] == numbers[2]
    assert len({*numbers[2:]}) == 4


def test_known_oversize_is_not_retried(tmp_path):
    task = Attempts(4)
    bare_trainer(tmp_path, halve_on_oom=True).validate(task, [make_data(16, 32), make_data(8, 8)])
    assert [size for size, _ in task.drawn] == [16, 8, *[4] * 10]


def test_halving_is_reported_once_per_run(tmp_path, caplog):
    trainer = bare_trainer(tmp_path, precision="fp64", halve_on_oom=True, max_epochs=3, log_level="WARNING")
    trainer.fit(Cramped(4), make_data(4, 8), val_dataloaders=make_data(16, 20))
    assert caplog.text.count("Lumen evaluates this and later batches in halves") == 1


def test_predictions_are_put_together(tmp_path):
    halves = bare_trainer(tmp_path, precision="fp64", halve_on_oom=True).predict(Cramped(4), make_data(16))
    small = bare_trainer(tmp_path, precision="fp64").predict(Cramped(4), make_data(4))
    assert [len(each) for each in halves] == [16, 16, 16, 2]
    assert torch.equal(torch.cat(halves), torch.cat(small))


class Returning(Cramped):
    def __init__(self, answer):
        super().__init__(3)
        self.answer = answer

    def predict_step(self, batch):
        self.require(batch[0])
        return self.answer(batch[0])


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda inputs: inputs.mean(), r"a tensor of shape \(\) for 3 and a tensor of shape \(\) for 3 samples"),
        (lambda inputs: {"a": inputs, "b": inputs.T}, r"a tensor of shape \(6, 3\) for 3"),
        (lambda inputs: "text", "'text' for 3 and 'text' for 3 samples"),
        (lambda inputs: 0.5, "0.5 for 3 and 0.5 for 3 samples"),
        (lambda inputs: [1.0, 2.0], r"\[1.0, 2.0\] for 3"),
    ],
)
def test_prediction_without_sample_dimension_raises(tmp_path, answer, found):
    with pytest.raises(ConfigError, match=rf"{found}.*Return tensors with the samples along dimension 0"):
        bare_trainer(tmp_path, precision="fp64", halve_on_oom=True).predict(Returning(answer), make_data(6))


class Named(NamedTuple):
    inputs: torch.Tensor
    words: list[str]


@dataclass
class Record:
    inputs: torch.Tensor
    words: tuple[str, ...]
    temperature: torch.Tensor


def batches(collate, size=4):
    inputs, _ = regression_data(size, torch.float64)
    return DataLoader(list(inputs), size, collate_fn=collate)


@pytest.mark.parametrize(
    "collate",
    [
        lambda rows: {"inputs": torch.stack(rows), "words": [f"{row[0]:.3f}" for row in rows], "note": "all"},
        lambda rows: Named(torch.stack(rows), [f"{row[0]:.3f}" for row in rows]),
        lambda rows: Record(torch.stack(rows), tuple(f"{row[0]:.3f}" for row in rows), torch.tensor(0.5)),
        lambda rows: (torch.stack(rows), [f"{row[0]:.3f}" for row in rows]),
    ],
)
def test_collections_are_cut_where_they_have_samples(tmp_path, collate):
    class Reading(Cramped):
        def predict_step(self, batch):
            values = batch if isinstance(batch, (dict, tuple)) else vars(batch)
            inputs, words, *_ = values.values() if isinstance(values, dict) else values
            self.require(inputs)
            assert list(words) == [f"{row[0]:.3f}" for row in inputs]
            assert not isinstance(batch, Record) or batch.temperature == 0.5
            assert not isinstance(batch, dict) or batch["note"] == "all"
            return inputs, list(words)

    ((inputs, words),) = bare_trainer(tmp_path, halve_on_oom=True).predict(Reading(1), batches(collate))
    assert torch.equal(inputs, regression_data(4, torch.float64)[0])
    assert words == [f"{row[0]:.3f}" for row in inputs]


@pytest.mark.parametrize(
    ("collate", "found"),
    [
        (lambda rows: (torch.stack(rows), torch.ones(5)), r"a tensor of shape \(5,\)"),
        (lambda rows: (torch.stack(rows), torch.stack(rows).numpy()), "array"),
        (lambda rows: {"x": torch.stack(rows), "boxes": [torch.ones(4)] * 4}, "tensor"),
    ],
)
def test_batch_with_unknown_samples_raises(tmp_path, collate, found):
    class Reading(Cramped):
        def predict_step(self, batch):
            self.require(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])

    message = rf"a batch of 4 samples does not fit .* the samples of .*{found}"
    with pytest.raises(DataError, match=message):
        bare_trainer(tmp_path, halve_on_oom=True).predict(Reading(1), batches(collate))


def test_without_the_flag_the_error_says_what_helps(tmp_path):
    with pytest.raises(torch.OutOfMemoryError, match="100 GiB") as caught:
        bare_trainer(tmp_path, precision="fp64").validate(Cramped(4), make_data(16))
    assert caught.value.__notes__[0].startswith(
        "Trainer(halve_on_oom=True) evaluates a batch that does not fit in halves. A smaller batch_"
    )


def test_oversized_sample_ends_the_evaluation(tmp_path, caplog):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        bare_trainer(tmp_path, precision="fp64", halve_on_oom=True, log_level="WARNING").validate(
            Cramped(0), make_data(16)
        )
    assert caught.value.__notes__[0] == "A single sample does not fit into memory, so halve_on_oom cannot help."
    assert caplog.text.count("Lumen evaluates this and later batches in halves") == 1
