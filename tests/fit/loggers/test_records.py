"""Records of every run directory, metrics.csv and system.csv: their cost, their rows, and when rows are written."""

import csv
import os
import resource
import signal
import tracemalloc

import pytest

import lumen
from lumen.errors import RunDirectoryError
from tests.helpers.records import fit, record_until_plateau
from tests.helpers.tasks import Regression, loader, quiet_trainer


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def read_rows(trainer):
    """Return (step, names with a value) of each row of metrics.csv."""
    columns, *found = read(trainer.run_directory / "metrics.csv")
    return [(int(row[0]), [name for name, value in zip(columns, row, strict=True) if value][2:]) for row in found]


# ---------------------------------------------------------------------- cost linear in the number of names


class Counted(str):
    """Name that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize("method", ["log_metrics", "log_system"])
def test_csv_row_compares_each_name_few_times(tmp_path, method):
    def compared(names):
        logger = lumen.CSVLogger()
        logger.open(tmp_path, resumed=False)
        place = (1, 0) if method == "log_metrics" else (1,)
        getattr(logger, method)({Counted(f"name_{number}"): 0.5 for number in range(names)}, *place)
        Counted.compared = 0
        getattr(logger, method)({Counted(f"name_{number}"): 0.5 for number in range(names)}, *place)
        logger.finalize("success")
        return Counted.compared

    assert compared(200) <= 5 * 200
    assert compared(2000) <= 5 * 2000


def test_new_names_in_each_step_copy_few_rows(tmp_path):
    logger, path = lumen.CSVLogger(), tmp_path / "metrics.csv"
    logger.open(tmp_path, resumed=False)
    file, copied = None, 0
    for step in range(300):
        logger.log_metrics({f"sample/{step}": 0.5}, step, 0)
        if (now := path.stat().st_ino) != file:
            file, copied = now, copied + step
    logger.save()
    assert copied <= 10 * 300
    columns, *rows = read(path)
    assert columns == ["step", "epoch", *(f"sample/{step}" for step in range(300))]
    assert [[place for place, cell in enumerate(row) if cell] for row in rows] == [[0, 1, 2 + n] for n in range(300)]
    logger.finalize("success")


# ---------------------------------------------------------------------- the file is never kept open and never damaged


def make_written_logger(directory, count):
    """Return a logger that has written rows of two columns."""
    logger = lumen.CSVLogger()
    logger.open(directory, resumed=False)
    with (directory / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "epoch", "x", "y"), *((step, 0, 0.5, -step) for step in range(count))])
    logger.open(directory, resumed=True)
    return logger


def add_a_column(logger):
    logger.log_metrics({"late": 1.0}, 0, 0)


def cut_back(logger):
    state = logger.state_dict()
    state["metrics.csv"]["rows"] -= 1
    logger.load_state_dict(state)


@pytest.mark.parametrize("act", [add_a_column, cut_back])
def test_csv_rewrite_uses_constant_memory(tmp_path, act):
    def peak(count):
        logger = make_written_logger(tmp_path, count)
        tracemalloc.start()
        try:
            act(logger)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            logger.finalize("success")

    peak(10)  # calls of the first write only
    assert peak(20_000) < 1.5 * peak(1_000)


@pytest.mark.parametrize("act", [add_a_column, cut_back])
def test_csv_survives_a_full_disk(tmp_path, act):
    logger = make_written_logger(tmp_path, 2000)
    path = tmp_path / "metrics.csv"
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(RunDirectoryError, match=r"metrics\.csv cannot be written: File too large"):
            act(logger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["metrics.csv"]
    act(logger)
    logger.finalize("success")
    kept = read(path)
    assert [row[:4] for row in kept[:2]] == [["step", "epoch", "x", "y"], ["0", "0", "0.5", "0"]]
    assert len(kept) == (2002 if act is add_a_column else 2000)


def test_what_a_kill_left_beside_the_csv_goes(tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(Regression(), loader())
    left = trainer.run_directory / ".metrics.csv.tmp"
    left.write_text("step,epo")
    quiet_trainer(tmp_path, max_steps=4, resume="auto").fit(Regression(), loader())
    assert not left.exists()


def test_columns_after_checkpoint_are_truncated_with_their_rows(tmp_path):
    logger = lumen.CSVLogger()
    logger.open(tmp_path, resumed=False)
    logger.log_metrics({"x": 1.0}, 1, 0)
    logger.log_metrics({"y": 2.0, "x": 3.0}, 2, 0)
    state = logger.state_dict()
    logger.log_metrics({"z": 4.0, "y": 5.0}, 3, 1)
    logger.load_state_dict(state)
    logger.log_metrics({"y": 6.0, "w": 7.0}, 3, 1)
    logger.finalize("success")
    assert read(tmp_path / "metrics.csv") == [
        ["step", "epoch", "x", "y", "w"], ["1", "0", "1.0", "", ""], ["2", "0", "3.0", "2.0", ""],
        ["3", "1", "", "6.0", "7.0"],
    ]  # fmt: skip


# ---------------------------------------------------------------------- the run's metrics.csv is unchanged


class Silent(lumen.Logger):
    def open(self, directory, *, resumed):
        self.rows = []

    def log_metrics(self, metrics, step, epoch):
        self.rows.append((step, epoch, dict(metrics)))


@pytest.mark.parametrize("several", [False, True])
def test_custom_logger_is_added_to_the_csv_record(tmp_path, several):
    own = Silent()
    trainer = quiet_trainer(tmp_path, max_steps=3, log_every_n_steps=1, logger=[own] if several else own)
    trainer.fit(Regression(), loader())
    assert (trainer.logger, trainer.loggers) == (own, [own])
    columns, *found = read(trainer.run_directory / "metrics.csv")
    assert [(int(step), int(epoch), {"loss": float(loss)}) for step, epoch, loss in found] == own.rows
    assert columns == ["step", "epoch", "loss"]
    assert len(read(trainer.run_directory / "system.csv")) == 4


def test_given_csv_logger_is_the_only_one(tmp_path):
    first, second = Silent(), lumen.CSVLogger()
    trainer = quiet_trainer(tmp_path, max_steps=3, log_every_n_steps=1, logger=[first, second])
    trainer.fit(Regression(), loader())
    assert trainer.loggers == [first, second]
    assert len(read(trainer.run_directory / "metrics.csv")) == 1 + len(first.rows)


@pytest.mark.parametrize("logger", [False, []])
def test_without_a_logger_there_is_no_record(tmp_path, logger):
    trainer = quiet_trainer(tmp_path, max_steps=3, log_every_n_steps=1, logger=logger)
    trainer.fit(Regression(), loader())
    assert trainer.loggers == []
    assert not list(trainer.run_directory.glob("*.csv"))


# ---------------------------------------------------------------------- the last step of a run


class Stopping(lumen.Callback):
    """Callback that ends training at a step: by a stop, or by a signal to this process."""

    def __init__(self, step, how):
        self.step, self.how = step, how

    def on_step_end(self, trainer, task):
        if trainer.global_step == self.step:
            if self.how == "stop":
                trainer.should_stop = True
            else:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 3}, [3]),
        ({"max_steps": 4}, [4]),
        ({"max_steps": 7}, [4, 7]),
        ({"max_epochs": 2}, [4, 8, 10]),
        ({"max_epochs": 2, "limit_val_batches": 0}, [4, 8, 10]),
        ({"max_epochs": 9, "callbacks": [Stopping(6, "stop")]}, [4, 6]),
        ({"max_epochs": 9, "callbacks": [lumen.EarlyStopping("val_loss", patience=0, min_delta=1e9)]}, [4, 8, 10]),
        ({"max_epochs": 1, "log_every_n_steps": 5}, [5]),
    ],
)
def test_last_step_is_always_logged(tmp_path, options, steps):
    trainer = fit(tmp_path, **options)
    assert [step for step, names in read_rows(trainer) if "loss" in names] == steps
    assert trainer.global_step == steps[-1]


def test_last_row_equals_that_of_every_step_logging(tmp_path):
    every = fit(tmp_path / "every", max_epochs=2, log_every_n_steps=1, gradient_clip_val=1.0)
    last = fit(tmp_path / "last", max_epochs=2, log_every_n_steps=100, gradient_clip_val=1.0)
    columns, *found = read(every.run_directory / "metrics.csv")
    (expected,) = [dict(zip(columns, row, strict=True)) for row in found if row[0] == "10" and row[2]]
    columns, *found = read(last.run_directory / "metrics.csv")
    (row,) = [dict(zip(columns, row, strict=True)) for row in found if dict(zip(columns, row, strict=True))["loss"]]
    assert row == expected
    assert row["epoch"] == "1"
    assert row["grad_norm"]


def test_skipped_last_window_is_not_logged(tmp_path):
    class Skips(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch)
            return None if batch_idx == 4 else loss

    trainer = fit(tmp_path, Skips(), max_epochs=1, log_level="CRITICAL")
    assert [step for step, names in read_rows(trainer) if "loss" in names] == [4]


@pytest.mark.parametrize("at", [2, 4, 5, 7])
def test_run_resumed_after_signal_has_same_rows(tmp_path, at):
    whole = fit(tmp_path / "whole", max_epochs=2)
    with pytest.raises(SystemExit):
        fit(tmp_path, max_epochs=2, callbacks=[Stopping(at, "signal")])
    assert (
        fit(tmp_path, max_epochs=2, resume="auto").run_directory.joinpath("metrics.csv").read_bytes()
        == (whole.run_directory / "metrics.csv").read_bytes()
    )


def test_extended_run_keeps_the_row_of_its_end(tmp_path):
    fit(tmp_path, max_steps=6)
    trainer = fit(tmp_path, max_steps=10, resume="auto")
    assert [step for step, names in read_rows(trainer) if "loss" in names] == [4, 6, 8, 10]


@pytest.mark.parametrize("cut", [3, 6])
def test_last_step_is_logged_once_despite_signal(tmp_path, cut):
    whole = record_until_plateau(tmp_path / "whole", None, "auto")
    assert record_until_plateau(tmp_path / "cut", cut, "auto") == whole
    assert [row["step"] for row in csv.DictReader(whole.splitlines()) if row["loss"]] == ["4", "6"]
