"""OnExceptionCheckpoint: a failing run saves its state, depending on the place of the exception."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lumen
from lumen.checkpoint import Checkpoint
from lumen.errors import NonFiniteLoss
from tests.helpers.tables import read_rows
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer, regression_data

FAILS_AT = 8  # with 5 steps an epoch, in the middle of the second one


class Failure(Exception):
    pass


class Normed(Regression):
    """Task with BatchNorm, dropout and a metric over the epoch, which all change within a step."""

    fails = True

    def __init__(self, dropout=0.2, **options):
        super().__init__(dropout=dropout, **options)
        self.norm = torch.nn.BatchNorm1d(FEATURES)

    def forward(self, inputs):
        return self.net(self.norm(inputs))

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss

    @property
    def is_time(self):
        return self.fails and self.global_step == FAILS_AT


class FailsInStep(Normed):
    def training_step(self, batch):
        loss = super().training_step(batch)
        if self.is_time:
            raise Failure
        return loss


class FailsBeforeUpdate(Normed):
    def on_before_optimizer_step(self, optimizer):
        if self.is_time:
            raise Failure


class FailsAfterUpdate(Normed):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.is_time:
            raise Failure


class FailsInValidation(Normed):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch)
        for logger in self.trainer.loggers:
            logger.log_text("note", f"batch {batch_idx}", self.global_step)
        if self.is_time and batch_idx == 1:
            raise Failure


class FailsAfterValidation(Normed):
    def on_validation_end(self):
        if self.is_time:
            raise Failure


class FailingSGD(torch.optim.SGD):
    def step(self, closure=None):
        if self.task.is_time:
            for parameter in self.param_groups[0]["params"][:1]:
                parameter.data.add_(1.0)
            raise Failure
        return super().step(closure)


class FailsInUpdate(Normed):
    def configure_optimizers(self):
        optimizer = FailingSGD(self.parameters(), 0.1, momentum=0.9)
        optimizer.task = self
        return optimizer


class Broken(Dataset):
    """Data set that fails at a sample of the fourth batch of an epoch, after a test has armed it."""

    fails = False

    def __init__(self):
        self.data = regression_data(40)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.fails and index == 24:
            raise Failure
        return self.data[0][index], self.data[1][index]


def make_saver(dirpath=None, **options):
    return [lumen.OnExceptionCheckpoint(dirpath), lumen.ModelCheckpoint(**({"every_n_epochs": 1} | options))]


def fit(tmp_path, task, data=None, **options):
    options.setdefault("callbacks", make_saver())
    trainer = quiet_trainer(tmp_path, **({"max_epochs": 3, "log_every_n_steps": 1, "val_check_interval": 2} | options))
    trainer.fit(task, data or loader(40), val_dataloaders=loader(20, shuffle=False))
    return trainer


def fit_and_fail(tmp_path, task, data=None, **options):
    with pytest.raises(Failure):
        fit(tmp_path, task, data, **options)


def list_checkpoints(tmp_path):
    return [path.name for path in sorted((tmp_path / "runs/run/checkpoints").iterdir())]


def record(tmp_path, name="run"):
    return read_rows(tmp_path / "runs" / name / "metrics.csv")


def assert_same(task, other):
    for name, tensor in task.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


# ---------------------------------------------------------------------- exact: `auto` resumes there


@pytest.mark.parametrize("kind", [FailsInValidation, FailsAfterValidation])
def test_a_failure_in_a_validation_costs_nothing(tmp_path, kind):
    whole = kind()
    whole.fails = False
    fit(tmp_path / "whole", whole)
    fit_and_fail(tmp_path, kind())
    assert list_checkpoints(tmp_path) == ["step-00000005", "step-00000008-validating"]
    task = kind()
    task.fails = False
    fit(tmp_path, task, resume="auto")
    assert_same(task, whole)
    assert record(tmp_path) == record(tmp_path / "whole")


def test_a_failure_while_data_is_loaded_costs_nothing(tmp_path):
    """The third batch of the second epoch is loaded after step 7, before any part of step 8."""

    def data(fails):
        broken = Broken()
        broken.fails = fails
        return DataLoader(broken, 8)

    whole = Normed()
    fit(tmp_path / "whole", whole, data(False))
    fit_and_fail(tmp_path, Normed(), data(True), callbacks=make_saver(every_n_epochs=0))
    assert list_checkpoints(tmp_path) == ["step-00000003"]
    task = Normed()
    fit(tmp_path, task, data(False), resume="auto")
    assert_same(task, whole)
    assert record(tmp_path) == record(tmp_path / "whole")


def test_saved_boundary_is_not_saved_again_on_exception(tmp_path):
    fit_and_fail(tmp_path, FailsInStep(), callbacks=make_saver(every_n_train_steps=4, every_n_epochs=0))
    assert list_checkpoints(tmp_path) == ["step-00000004", "step-00000008"]


def test_checkpoints_of_failures_count_among_the_others(tmp_path):
    saving = lumen.ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, on_best=False, keep_last=1)
    fit_and_fail(tmp_path, FailsInValidation(), callbacks=[lumen.OnExceptionCheckpoint(), saving])
    newest = Checkpoint.open(tmp_path / "runs/run/checkpoints" / list_checkpoints(tmp_path)[-1])
    assert newest.path.name == "step-00000008-validating"
    assert newest.info["best"] == list_checkpoints(tmp_path)[0]
    assert len(list_checkpoints(tmp_path)) <= 2


# ---------------------------------------------------------------------- within a step: resumed by path only


@pytest.mark.parametrize("kind", [FailsInStep, FailsBeforeUpdate])
def test_failure_before_update_saves_previous_parameters(tmp_path, kind):
    until = Normed()
    fit(tmp_path / "until", until, max_steps=FAILS_AT)
    fit_and_fail(tmp_path, kind())
    assert list_checkpoints(tmp_path) == ["exception-step-00000008", "step-00000005"]
    path = tmp_path / "runs/run/checkpoints/exception-step-00000008"
    for (name, expected), saved in zip(
        until.named_parameters(), kind.load_from_checkpoint(path).parameters(), strict=True
    ):
        assert torch.equal(expected, saved), name
    state = Checkpoint.open(path).state["progress"]
    assert (state["step"], state["samples"], state["micro_batches"]) == (8, 24, 8)


def test_auto_resume_ignores_exception_checkpoints(tmp_path):
    whole = FailsInStep()
    whole.fails = False
    fit(tmp_path / "whole", whole)
    fit_and_fail(tmp_path, FailsInStep())
    task = FailsInStep()
    task.fails = False
    assert fit(tmp_path, task, resume="auto").run.checkpoint.path.name == "step-00000005"
    assert_same(task, whole)
    assert "exception-step-00000008" in list_checkpoints(tmp_path)


def test_exception_checkpoint_trains_each_remaining_sample_once(tmp_path):
    fit_and_fail(tmp_path, FailsInStep())
    seen = []

    class Seen(Normed):
        def training_step(self, batch):
            seen.append(batch[0])
            return super().training_step(batch)

    whole, kept = Seen(), seen
    fit(tmp_path / "whole", whole)
    expected, seen = kept[FAILS_AT:], []
    trainer = fit(tmp_path, Seen(), resume=tmp_path / "runs/run/checkpoints/exception-step-00000008")
    assert trainer.global_step == 15
    assert trainer.run_directory.name == "run-2"
    assert len(seen) == len(expected) == 7
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))


def test_failure_after_update_saves_the_new_parameters(tmp_path):
    class AfterEight(FailsAfterUpdate):
        @property
        def is_time(self):
            return self.fails and self.global_step == FAILS_AT + 1

    until = Normed()
    fit(tmp_path / "until", until, max_steps=FAILS_AT + 1)
    fit_and_fail(tmp_path, AfterEight())
    assert list_checkpoints(tmp_path) == ["exception-step-00000009", "step-00000005"]
    assert_same(until, Normed.load_from_checkpoint(tmp_path / "runs/run/checkpoints/exception-step-00000009"))


def test_second_failure_keeps_the_first_exception_checkpoint(tmp_path):
    for _ in range(2):
        fit_and_fail(tmp_path, FailsInStep(), resume="auto")
    assert list_checkpoints(tmp_path) == ["exception-step-00000008", "exception-step-00000008-1", "step-00000005"]


def test_all_of_them_may_go_to_another_place(tmp_path):
    for kind in (FailsInStep, FailsInValidation):
        fit_and_fail(tmp_path, kind(), callbacks=make_saver(tmp_path / "failed"))
    assert sorted(path.name for path in (tmp_path / "failed").iterdir()) == [
        "exception-step-00000008", "exception-step-00000008-1"
    ]  # fmt: skip
    assert list_checkpoints(tmp_path) == ["step-00000005"]


# ---------------------------------------------------------------------- no checkpoint


def test_failure_inside_update_saves_nothing_and_warns(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lumen"):
        fit_and_fail(tmp_path, FailsInUpdate(), log_level="WARNING")
    assert list_checkpoints(tmp_path) == ["step-00000005"]
    assert "no checkpoint is saved on this exception: the exception was raised inside optimizer.step" in caplog.text


def test_a_loss_that_is_not_finite_saves_nothing(tmp_path):
    class Diverges(Normed):
        def training_step(self, batch):
            loss = super().training_step(batch)
            return loss * float("nan") if self.is_time else loss

    with pytest.raises(NonFiniteLoss):
        fit(tmp_path, Diverges())
    assert list_checkpoints(tmp_path) == ["step-00000005"]


def test_failed_exception_save_keeps_the_original_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    fit_and_fail(tmp_path, FailsInStep(), callbacks=make_saver(tmp_path / "file/below"), log_level="CRITICAL")


def test_failure_before_first_update_saves_nothing(tmp_path):
    """A failure in an evaluation saves nothing either."""

    class FailsAtOnce(Normed):
        def training_step(self, batch):
            raise Failure

        def test_step(self, batch):
            raise Failure

    fit_and_fail(tmp_path, FailsAtOnce())
    assert list_checkpoints(tmp_path) == []
    trainer = fit(tmp_path, Normed(), max_steps=2, callbacks=[lumen.OnExceptionCheckpoint()])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Failure):
        trainer.test(FailsAtOnce(), loader(20))
    assert sorted(tmp_path.rglob("*")) == before
