"""Profilers: they measure where the time goes, change nothing, and leave nothing behind."""

import gzip
import json
import os
import re
import signal
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, Dataset, get_worker_info

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, loader, quiet_trainer, regression_data

SLEEP_S = 2**-5  # sums of this number are exact


class Slow(Dataset):
    """Data set that sleeps for a batch of 8 as long as the other parts sleep once."""

    def __init__(self, samples=40):
        self.inputs, self.targets = regression_data(samples)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        time.sleep(SLEEP_S / 8)
        return self.inputs[index], self.targets[index]


def slow_loader(**options):
    return DataLoader(Slow(), 8, **options)


class SlowCallback(lumen.Callback):
    def on_after_backward(self, trainer, task):
        time.sleep(SLEEP_S)


class SlowLogger(lumen.Logger):
    def open(self, directory, *, resumed):
        pass

    def log_metrics(self, metrics, step, epoch):
        time.sleep(SLEEP_S)

    def save(self):
        time.sleep(SLEEP_S)


class SlowStep(Regression):
    def training_step(self, batch):
        time.sleep(SLEEP_S)
        return super().training_step(batch)


class SlowTransfer(Regression):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        time.sleep(SLEEP_S)
        return batch


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(SLEEP_S)
        return super().step(closure)


class Scheduled(Regression):
    """Task with a schedule that moves at each step."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SlowUpdate(Regression):
    def configure_optimizers(self):
        return SlowOptimizer(self.parameters(), lr=0.1)


def compute_shares(profiler):
    total_s = sum(row.total_s for row in profiler.rows)
    return {row.name: row.total_s / total_s for row in profiler.rows}


def count_calls(profiler):
    return {row.name: row.calls for row in profiler.rows}


def simple_fit(tmp_path, task, data, **options):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": False, "logger": False} | options
    val = options.pop("val", None)
    trainer = quiet_trainer(tmp_path, profiler="simple", **options)
    trainer.fit(task, data, val_dataloaders=val)
    return trainer


# ---------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("part", "task", "data", "options"),
    [
        ("data wait", Regression, slow_loader, {}),
        ("data wait", Regression, lambda: slow_loader(sampler=range(40)), {}),
        ("data wait (validation)", Regression, lambda: loader(8), {"val": slow_loader()}),
        ("transfer", SlowTransfer, loader, {}),
        ("training_step", SlowStep, loader, {}),
        ("optimizer.step", SlowUpdate, loader, {}),
        ("SlowCallback.on_after_backward", Regression, loader, {"callbacks": [SlowCallback()]}),
        ("SlowLogger.log_metrics", Regression, loader, {"logger": SlowLogger(), "log_every_n_steps": 1}),
    ],
)
@pytest.mark.usefixtures("clock")
def test_what_sleeps_is_named(tmp_path, part, task, data, options):
    profiler = simple_fit(tmp_path, task(), data(), **options).profiler
    assert profiler.rows[0].name == part
    assert compute_shares(profiler)[part] > 0.5


class Counting(Slow):
    """Profiler that counts the samples of workers, which are the time here; workers prefetch only as allowed."""

    def __init__(self, samples, pause_s=0.0, may_make=None):
        super().__init__(samples)
        self.made, self.pause_s = torch.zeros(2).share_memory_(), pause_s
        self.may_make = torch.tensor(may_make or samples).share_memory_()

    def __getitem__(self, index):
        time.sleep(self.pause_s)
        while index >= self.may_make:
            time.sleep(0.001)
        self.made[get_worker_info().id] += 1
        return self.inputs[index], self.targets[index]

    def count(self):
        return self.made.sum().item()


class AheadOfSteps(Regression):
    """Task that waits in each step until workers have made one batch, the one after the next."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def training_step(self, batch, batch_idx):
        self.dataset.may_make.fill_(8 * (batch_idx + 3))
        while self.dataset.count() < min(self.dataset.may_make, len(self.dataset)):
            time.sleep(0.001)
        return super().training_step(batch)


def fit_with_workers(tmp_path, monkeypatch, dataset, task):
    monkeypatch.setattr("lumen.profilers.simple.perf_counter", dataset.count)
    return simple_fit(tmp_path, task, DataLoader(dataset, 8, num_workers=2), max_epochs=1).profiler


def test_workers_that_are_too_slow_are_waited_for(tmp_path, monkeypatch):
    profiler = fit_with_workers(tmp_path, monkeypatch, Counting(80, pause_s=0.005), Regression())
    assert profiler.rows[0].name == "data wait"
    assert count_calls(profiler)["data wait"] == 10


def test_workers_that_are_fast_enough_are_not(tmp_path, monkeypatch):
    """Only the first batch takes longer, as workers make the second one at the same time."""
    dataset = Counting(80, may_make=16)
    profiler = fit_with_workers(tmp_path, monkeypatch, dataset, AheadOfSteps(dataset))
    times = {row.name: row.total_s for row in profiler.rows}
    assert sum(times.values()) == 80
    assert times["data wait"] <= 16
    assert times["training_step"] >= 64


def test_the_calls_of_each_part_are_counted(tmp_path):
    """50 samples in batches of 8 are 7 micro-batches and 4 steps an epoch; 20 validation samples are 3 batches."""
    trainer = simple_fit(
        tmp_path, Scheduled(), loader(50, 8), val=loader(20, 8), accumulate_grad_batches=2, gradient_clip_val=0.1,
        logger=True, log_every_n_steps=4, enable_checkpointing=True, num_sanity_val_steps=1,
    )  # fmt: skip
    found = count_calls(trainer.profiler)
    expected = {
        "data wait": 14, "transfer": 14, "training_step": 14, "backward": 14,
        "clip_grad_norm": 8, "optimizer.step": 8, "optimizer.zero_grad": 8, "StepLR.step": 8,
        "data wait (validation)": 7, "transfer (validation)": 7, "validation_step": 7,
        "ModelCheckpoint.on_step_checkpoint": 8, "save_checkpoint": 2, "CSVLogger.save": 2, "CSVLogger.log_system": 2,
        "loop": 0, "loop (validation)": 0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert "unscale" not in found  # fp32 has no gradients to unscale


def test_loaders_that_are_opened_anew_are_timed_too(tmp_path):
    class Reloaded(Regression):
        def train_dataloader(self):
            return loader(40, 8)

        def val_dataloader(self):
            return loader(16, 8)

    profiler = simple_fit(tmp_path, Reloaded(), None, max_epochs=3, reload_dataloaders_every_n_epochs=1).profiler
    assert count_calls(profiler)["data wait"] == 15
    assert count_calls(profiler)["data wait (validation)"] == 6


def test_the_times_add_up_to_the_whole(tmp_path):
    class Clock(Regression):
        def on_fit_start(self):
            self.times = [time.perf_counter()]

        def on_fit_end(self):
            self.times.append(time.perf_counter())

    task, before = Clock(), time.perf_counter()
    profiler = simple_fit(tmp_path, task, loader(), val=loader()).profiler
    total_s = sum(row.total_s for row in profiler.rows)
    assert task.times[1] - task.times[0] <= total_s <= time.perf_counter() - before


@pytest.mark.usefixtures("clock")
def test_a_part_inside_of_another_one_counts_once(tmp_path):
    class Saving(lumen.Callback):
        def on_step_end(self, trainer, task):
            trainer.save_checkpoint(tmp_path / f"mine-{trainer.global_step}-{trainer.current_epoch}")

    profiler = simple_fit(tmp_path, Regression(), loader(8), logger=SlowLogger(), callbacks=[Saving()]).profiler
    rows = {row.name: row for row in profiler.rows}
    assert rows["SlowLogger.save"].total_s == rows["SlowLogger.save"].calls * SLEEP_S > 0
    assert rows["save_checkpoint"].calls == rows["Saving.on_step_end"].calls == 2
    assert rows["Saving.on_step_end"].total_s == rows["save_checkpoint"].total_s == 0


@pytest.mark.usefixtures("clock")
def test_the_table_is_printed_and_kept(tmp_path, capsys):
    trainer = simple_fit(tmp_path, SlowStep(), loader(50, 8), max_epochs=1, logger=True)
    printed, text = capsys.readouterr().err, (trainer.run_directory / "profile.txt").read_text()
    assert printed == text
    assert (trainer.run_directory / "run.log").read_text().endswith(text)
    title, header, *rows = text.splitlines()
    assert re.fullmatch(r"fit: 7 steps in \d+\.\d\d s", title)
    assert header.split() == ["part", "calls", "total", "s", "mean", "ms", "ms/step", "share", "%"]
    name, count, total_s, mean_ms, per_step_ms, share = rows[0].split()
    assert (name, count) == ("training_step", "7")
    assert float(mean_ms) == float(per_step_ms) == pytest.approx(float(total_s) / 7 * 1e3, abs=0.2)
    assert float(share) == pytest.approx(100 * compute_shares(trainer.profiler)["training_step"], abs=0.06)
    assert sum(float(row.split()[-1]) for row in rows[:-1]) == pytest.approx(100, abs=0.05 * len(rows))
    assert rows[-1].split()[0] == "total"
    assert rows[-1].split()[-1] == "100.0"


def test_a_resumed_run_adds_its_table(tmp_path):
    for epochs in (1, 2):
        trainer = quiet_trainer(tmp_path, max_epochs=epochs, resume="auto", profiler="simple")
        trainer.fit(Regression(), loader())
    titles = [line for line in (trainer.run_directory / "profile.txt").read_text().splitlines() if "fit: " in line]
    assert [title.split(" in ")[0] for title in titles] == ["fit: 7 steps", "fit: 7 steps"]


@pytest.mark.parametrize(("stage", "word"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
@pytest.mark.usefixtures("clock")
def test_an_evaluation_has_its_own_table(tmp_path, capsys, stage, word):
    trainer = simple_fit(tmp_path, SlowStep(), loader(), logger=True)
    record = (trainer.run_directory / "profile.txt").read_bytes()
    capsys.readouterr()
    getattr(trainer, stage)(Regression(), slow_loader())
    assert trainer.profiler.rows[0].name == f"data wait ({word})"
    found = count_calls(trainer.profiler)
    assert found[f"{word}_step"] == found[f"data wait ({word})"] == 5
    assert "training_step" not in found
    assert capsys.readouterr().err.startswith(f"{stage}: 5 batches in ")
    assert (trainer.run_directory / "profile.txt").read_bytes() == record


def test_a_dry_run_prints_and_writes_nothing(tmp_path, capsys):
    trainer = quiet_trainer(tmp_path, fast_dev_run=True, profiler="simple")
    trainer.fit(Regression(), loader(), val_dataloaders=loader())
    assert capsys.readouterr().err.startswith("fit: 1 steps in ")
    assert list(tmp_path.rglob("*")) == []


# ---------------------------------------------------------------------- no side effects

SHORT_TRACE = {"wait": 1, "warmup": 1, "active": 2}


@pytest.mark.parametrize("profiler", ["simple", lumen.TorchProfiler(**SHORT_TRACE, repeat=0)])
def test_profiling_does_not_change_the_run(tmp_path, profiler):
    runs = []
    for name, chosen in (("off", None), ("on", profiler)):
        task = Scheduled(dropout=0.2)
        trainer = quiet_trainer(
            tmp_path / name, max_epochs=2, profiler=chosen, accumulate_grad_batches=2, gradient_clip_val=0.1,
            log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(task, loader(50, 8), val_dataloaders=loader(20, 8))
        predictions = torch.cat(trainer.predict(task, loader(20, 8)))
        runs.append(
            (task.state_dict(), predictions, (trainer.run_directory / "metrics.csv").read_bytes(), torch.rand(4))
        )
    (ours, predicted, metrics, drawn), (theirs, *others) = runs
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(predicted, others[0])
    assert metrics == others[1]
    assert torch.equal(drawn, others[2])


def list_attributes(trainer):
    """Return the attributes of every object that the loop calls."""
    run = trainer.run
    owners = [trainer, run, run.strategy, run.precision, run.calls, run.records, run.saves, run.optim.optimizer]
    owners += [run.loaders.train, *run.loaders.evaluation]
    owners += [*run.records.loggers, *run.optim.schedulers, *run.hooks.callbacks, run.task]
    hooks = {name: len(calls) for name, calls in vars(run.hooks).items() if name.startswith("on_")}
    return [(type(owner).__name__, sorted(vars(owner))) for owner in owners], hooks


class Failing(lumen.Callback):
    """Callback that ends a run in its fifth step, in the given way."""

    def __init__(self, how):
        self.how = how

    def on_before_optimizer_step(self, trainer, task, optimizer):
        if trainer.global_step == 4 and self.how == "error":
            raise RuntimeError("broken")
        if trainer.global_step == 4 and self.how == "signal":
            os.kill(os.getpid(), signal.SIGINT)


ENDS = {"end": None, "error": RuntimeError, "signal": KeyboardInterrupt}


@pytest.mark.parametrize("how", ENDS)
def test_a_run_is_left_as_it_was_found(tmp_path, how):
    left = []
    for name, profiler in (("off", None), ("simple", "simple"), ("torch", lumen.TorchProfiler(**SHORT_TRACE))):
        trainer = quiet_trainer(
            tmp_path / name, max_epochs=1, profiler=profiler, callbacks=[Failing(how)], gradient_clip_val=0.1
        )
        expected = ENDS[how]
        with pytest.raises(expected) if expected else contextmanager(lambda: (yield))():
            trainer.fit(Scheduled(), loader(), val_dataloaders=loader())
        left.append(list_attributes(trainer))
    (owners, hooks), *others = left
    for found_owners, found_hooks in others:
        assert found_owners == owners
        assert {name: found_hooks[name] for name in hooks} == hooks


@pytest.mark.parametrize("how", ["error", "signal"])
def test_profile_is_reported_after_an_early_end(tmp_path, how):
    trainer = quiet_trainer(
        tmp_path, max_epochs=1, profiler="simple", callbacks=[Failing(how)], log_level="INFO", seed=1
    )
    with pytest.raises(ENDS[how]):
        trainer.fit(SlowStep(), loader())
    text = (trainer.run_directory / "profile.txt").read_text()
    assert text.startswith("fit: 4 steps" if how == "error" else "fit: 5 steps")
    assert text.splitlines()[2].startswith("training_step")
    log = (trainer.run_directory / "run.log").read_text()
    if how == "signal":
        assert log.index("Resume with:") > log.index(text)  # the last line is the command that resumes the run
    else:
        assert text in log


def test_failing_report_keeps_the_error_of_the_run(tmp_path):
    class Unwritable(lumen.Callback):
        def on_train_start(self, trainer, task):
            (trainer.run_directory / "profile.txt").mkdir()

    for how, error in (("error", RuntimeError), ("end", IsADirectoryError)):
        trainer = quiet_trainer(
            tmp_path / how,
            max_epochs=1,
            profiler="simple",
            callbacks=[Unwritable(), Failing(how)],
            log_level="CRITICAL",
        )
        with pytest.raises(error):
            trainer.fit(Regression(), loader())


def test_a_run_that_never_began_has_no_table(tmp_path, capsys):
    class Broken(Regression):
        def configure_optimizers(self):
            raise RuntimeError("broken")

    trainer = quiet_trainer(tmp_path, max_epochs=1, profiler="simple")
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken(), loader())
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------- traces


def read_traces(directory):
    """Return names and labels of the traces in a directory, with the count of each annotation."""
    found = {}
    for path in sorted(directory.iterdir()):
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        labels = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
        found[path.name] = labels, operators, events
    return found


def test_trace_holds_labels_and_operators_of_active_steps(tmp_path, capsys):
    trainer = quiet_trainer(
        tmp_path, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1, num_sanity_val_steps=0,
        profiler=lumen.TorchProfiler(**SHORT_TRACE), callbacks=[SlowCallback()],
    )  # fmt: skip
    trainer.fit(Scheduled(), loader(64, 4), val_dataloaders=loader(8, 8))
    ((name, (labels, operators, _)),) = read_traces(trainer.run_directory / "profile").items()
    assert name.startswith("fit-step-00000004-rank0.")
    assert name.endswith(".pt.trace.json.gz")  # as TensorBoard's plugin expects it
    expected = {
        "ProfilerStep#2": 1, "ProfilerStep#3": 1, "training_step": 4, "backward": 4, "optimizer.step": 2,
        "optimizer.zero_grad": 2, "clip_grad_norm": 2, "StepLR.step": 2, "SlowCallback.on_after_backward": 4,
    }  # fmt: skip
    assert {label: labels[label] for label in expected} == expected
    assert labels["data wait"] >= 4
    assert "validation_step" not in labels
    assert {"aten::addmm", "aten::tanh"} <= operators
    title, header, *rows = capsys.readouterr().err.splitlines()
    assert title == "fit: operators until step 4"
    assert header.split() == ["operator", "calls", "self", "%", "self", "cpu", "ms", "cpu", "ms"]
    assert rows[0].startswith("SlowCallback.on_after_backward")
    assert len(rows) == 20
    assert (trainer.run_directory / "profile.txt").read_text().startswith(title)


def test_each_cycle_and_resume_has_a_trace(tmp_path):
    for epochs in (1, 2):
        trainer = quiet_trainer(
            tmp_path,
            max_epochs=epochs,
            resume="auto",
            profiler=lumen.TorchProfiler(wait=0, warmup=1, active=2, repeat=2),
        )
        trainer.fit(Regression(), loader(64, 8))
    names = [name.split("-rank")[0] for name in read_traces(trainer.run_directory / "profile")]
    assert names == [f"fit-step-{step:08d}" for step in (3, 6, 11, 14)]


def test_an_unfinished_cycle_is_written_too(tmp_path):
    trainer = quiet_trainer(
        tmp_path, max_epochs=1, profiler=lumen.TorchProfiler(wait=1, warmup=1, active=50), callbacks=[Failing("error")]
    )
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Regression(), loader())
    ((labels, *_),) = read_traces(trainer.run_directory / "profile").values()
    assert (labels["training_step"], labels["optimizer.step"]) == (3, 2)


def test_a_run_too_short_to_record_says_so(tmp_path, caplog):
    trainer = quiet_trainer(tmp_path, max_epochs=1, profiler="torch", log_level="WARNING")
    trainer.fit(Regression(), loader(40, 8))
    assert (
        "TorchProfiler recorded no step, because fit ended after 5 steps, before the end of the first wait"
        in caplog.text
    )
    assert not (trainer.run_directory / "profile").exists()


def test_torch_profiler_takes_file_schedule_and_handler(tmp_path):
    ready = []
    profiler = lumen.TorchProfiler(
        tmp_path / "out", "operators", schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=ready.append,
    )  # fmt: skip
    trainer = quiet_trainer(tmp_path, max_epochs=1, profiler=profiler)
    trainer.fit(Regression(), loader())
    (done,) = ready
    assert [each.count for each in done.key_averages() if each.key == "training_step"] == [2]
    assert "training_step" in (tmp_path / "out/fit-operators.txt").read_text()
    trainer.validate(Regression(), loader(8, 8))  # too short to record
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fit-operators.txt"]


def test_simple_profiler_records_duration_of_each_call(tmp_path):
    profiler = lumen.SimpleProfiler()
    quiet_trainer(tmp_path, max_epochs=1, profiler=profiler).fit(Regression(), loader())
    steps, updates = profiler.recorded_durations["training_step"], profiler.recorded_durations["optimizer.step"]
    assert len(steps) == len(updates) == 7
    assert min(steps) > 0
    (row,) = [each for each in profiler.rows if each.name == "training_step"]
    assert sum(steps) == pytest.approx(row.total_s)  # no part is inside
    with profiler.profile("outer"), profiler.profile("inner"):
        time.sleep(0.01)
    assert profiler.recorded_durations["outer"][0] > profiler.recorded_durations["inner"][0] >= 0.01


def test_shapes_memory_and_stacks_are_recorded_on_demand(tmp_path, capsys):
    profiler = lumen.TorchProfiler(
        wait=0, warmup=1, active=2, record_shapes=True, profile_memory=True, with_stack=True, row_limit=200,
        dirpath=tmp_path / "traces",
    )  # fmt: skip
    quiet_trainer(tmp_path, profiler=profiler).predict(Regression(), loader(50, 8, shuffle=False))
    ((name, (labels, _, events)),) = read_traces(tmp_path / "traces").items()
    assert name.startswith("predict-batch-00000003-rank0.")
    assert labels["predict_step"] == 2
    assert any(event["args"]["Input Dims"][1] == [8, 6] for event in events if event["name"] == "aten::addmm")
    assert any("test_profiler.py" in event["name"] or "tasks.py" in event["name"] for event in events)
    assert any(event["name"] == "[memory]" for event in events)
    _, header, *rows = capsys.readouterr().err.splitlines()
    assert header.split()[-4:] == ["self", "MB", "input", "shapes"]
    assert any(row.startswith("aten::addmm") and row.endswith("[[16], [8, 6], [6, 16]]") for row in rows)
    assert not any(".py(" in row or row.startswith("<built-in") for row in rows)  # these are in the trace only


# ---------------------------------------------------------------------- choice of a profiler


def test_a_profiler_goes_by_its_name():
    assert isinstance(lumen.Trainer(max_epochs=1, profiler="simple").profiler, lumen.SimpleProfiler)
    for name in ("torch", "pytorch"):
        assert isinstance(lumen.Trainer(max_epochs=1, profiler=name).profiler, lumen.TorchProfiler)
    assert isinstance(lumen.Trainer(max_epochs=1, profiler="advanced").profiler, lumen.AdvancedProfiler)
    assert isinstance(lumen.Trainer(max_epochs=1).profiler, lumen.PassThroughProfiler)
    with pytest.raises(ConfigError, match=r"profiler: expected 'simple', 'advanced', 'torch', .* found 'fast'"):
        lumen.Trainer(max_epochs=1, profiler="fast")


@pytest.mark.parametrize("options", [{"wait": -1}, {"warmup": 0}, {"active": 0}, {"repeat": -1}])
def test_a_schedule_that_cannot_be_is_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"TorchProfiler: {name} must be at least ., found {value}"):
        lumen.TorchProfiler(**options)


def test_custom_profiler_sees_every_part(tmp_path):
    class Journal(lumen.Profiler):
        start = stop = None

        def begin(self, run, directory):
            self.lines, self.depth = [f"start {run.stage}"], 0

        @contextmanager
        def part(self, name, calls=1):
            self.lines.append("  " * self.depth + name)
            self.depth += 1
            yield
            self.depth -= 1

        def step(self):
            assert self.depth == 0
            self.lines.append("step")

        def end(self):
            self.lines.append("stop")

    journal = Journal()
    trainer = quiet_trainer(tmp_path, max_steps=2, profiler=journal, logger=False, enable_checkpointing=False)
    trainer.fit(Regression(), loader(50, 8))
    step = ["data wait", "data wait", "transfer", "optimizer.zero_grad", "training_step", "backward", "optimizer.step"]
    assert journal.lines == ["start fit", *step, "step", *step, "step", "logging", "stop"]


@pytest.fixture
def profiler_config(tmp_path, monkeypatch):
    """Write a config file whose trainer has a profiler, in a temporary working directory."""
    monkeypatch.chdir(tmp_path)

    def write(profiler):
        trainer = {"max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False, "profiler": profiler}
        data = {"class_path": "tests.helpers.cli_tasks.Points", "init_args": {"samples": 12}}
        settings = {"model": {"class_path": "tests.helpers.cli_tasks.Line"}, "data": data, "trainer": trainer}
        (tmp_path / "line.yaml").write_text(yaml.safe_dump(settings))
        return "line.yaml"

    return write


@pytest.mark.slow
def test_a_config_names_a_profiler_or_describes_it(profiler_config, tmp_path, capsys):
    described = {"class_path": "lumen.TorchProfiler", "init_args": {"wait": 0, "warmup": 1, "active": 1}}
    kind, length = "--trainer.profiler", "--trainer.profiler.row_limit"
    assert main(["fit", "--config", profiler_config(described)]) == 0
    assert main(["fit", "--config", "runs/line/config.yaml", "--trainer.name", "again", length, "3"]) == 0
    assert main(["fit", "--config", profiler_config("simple")]) == 0
    assert main(["fit", "--config", profiler_config("simple"), kind, "null"]) == 0
    assert main(["fit", "--config", profiler_config(None), kind, "lumen.SimpleProfiler"]) == 0
    assert (
        main(["fit", "--config", profiler_config("simple"), kind, "TorchProfiler", f"{kind}.wait", "0", length, "2"])
        == 0
    )
    runs = tmp_path / "runs"
    for name in ("line", "again", "line-5"):
        assert len(list((runs / name / "profile").iterdir())) == 1
    assert len((runs / "again" / "profile.txt").read_text().splitlines()) == 5
    for name in ("line-2", "line-4"):
        assert (runs / name / "profile.txt").read_text().startswith("fit: 3 steps")
    assert not (runs / "line-3" / "profile.txt").exists()
    capsys.readouterr()
    assert main(["fit", "--config", profiler_config("fast")]) == 2
    assert "trainer.profiler" in capsys.readouterr().err


# ---------------------------------------------------------------------- parts measured by the user


class Encoding(Regression):
    def setup(self, stage):
        with self.trainer.profiler.profile("early"):  # before any measurement
            pass

    def training_step(self, batch):
        with self.trainer.profiler.profile("encoder"):
            self.encode()
        return super().training_step(batch)

    def encode(self):
        time.sleep(SLEEP_S)


@pytest.mark.usefixtures("clock")
def test_a_task_measures_a_part_of_its_own(tmp_path):
    profiler = lumen.SimpleProfiler()
    trainer = quiet_trainer(tmp_path, max_steps=3, profiler=profiler)
    with profiler.profile("around"):
        trainer.fit(Encoding(), loader())
    rows = {row.name: row for row in profiler.rows}
    assert rows["encoder"].calls == rows["training_step"].calls == 3
    assert 3 * SLEEP_S <= rows["encoder"].total_s < 12 * SLEEP_S
    assert rows["training_step"].total_s < rows["encoder"].total_s
    assert not {"early", "around"} & rows.keys()
    assert "loop" in rows
    quiet_trainer(tmp_path / "none", max_steps=1).fit(Encoding(), loader())  # no profiler was requested


@pytest.mark.parametrize("kind", [lumen.SimpleProfiler, lumen.AdvancedProfiler, lumen.TorchProfiler])
def test_what_was_not_started_cannot_end(kind):
    profiler = kind()
    with pytest.raises(ConfigError, match="stop: 'a' cannot end here, no part is in progress"):
        profiler.stop("a")
    profiler.start("a")
    profiler.start("b")
    with pytest.raises(ConfigError, match=r"'a' cannot end here, 'b' is in progress\. Start each part"):
        profiler.stop("a")
    profiler.stop("b")
    profiler.stop("a")


@pytest.mark.parametrize("kind", [lumen.SimpleProfiler, lumen.AdvancedProfiler, lumen.TorchProfiler])
def test_error_between_start_and_stop_is_kept(tmp_path, kind):
    class Fails(Regression):
        def training_step(self, batch):
            with self.trainer.profiler.profile("outer"):
                self.trainer.profiler.start("inner")
                raise RuntimeError("broken")

    profiler = kind()
    with pytest.raises(RuntimeError, match="broken"):
        quiet_trainer(tmp_path, max_steps=1, profiler=profiler).fit(Fails(), loader())
    with pytest.raises(ConfigError, match="no part is in progress"):
        profiler.stop("inner")


def test_a_profiler_written_for_lightning_measures_a_run(tmp_path, capsys):
    class Counting(lumen.Profiler):
        def __init__(self, **options):
            super().__init__(**options)
            self.calls, self.log = Counter(), []

        def setup(self, stage, local_rank=None, log_dir=None):
            self.log.append((stage, local_rank, log_dir))

        def start(self, action_name):
            self.calls[action_name] += 1

        def stop(self, action_name):
            self.calls[action_name] -= 100

        def summary(self):
            return f"counted {self.calls['training_step']}"

        def teardown(self, stage):
            self.log.append(stage)

    profiler = Counting()
    trainer = quiet_trainer(tmp_path, max_steps=3, profiler=profiler)
    trainer.fit(Regression(), loader())
    assert profiler.calls["training_step"] == 3 - 300
    assert profiler.log == [("fit", 0, str(trainer.run_directory)), "fit"]
    captured = capsys.readouterr()
    assert "counted -297" in captured.out + captured.err
    assert (trainer.run_directory / "profile.txt").read_text() == "counted -297\n"
    named = Counting(dirpath=tmp_path / "profiles", filename="mine")
    quiet_trainer(tmp_path / "named", max_steps=1, profiler=named).fit(Regression(), loader())
    assert (tmp_path / "profiles/fit-mine.txt").read_text() == "counted -99\n"


# ---------------------------------------------------------------------- every function


def test_advanced_profile_lists_functions_slowest_part_first(tmp_path, capsys):
    trainer = quiet_trainer(tmp_path, max_steps=3, profiler="advanced")
    trainer.fit(Encoding(), loader())
    text = (trainer.run_directory / "profile.txt").read_text()
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
    names = [line for line in text.splitlines() if re.fullmatch(r"[\w. ()]+", line) and not line.startswith(" ")]
    assert {"encoder", "training_step", "backward", "optimizer.step"} <= {*names}
    seconds = [float(each) for each in re.findall(r"in ([0-9.]+) seconds", text)]
    assert len(seconds) == len(names)
    assert seconds == sorted(seconds, reverse=True)
    encoder = re.split(r"^(?=\w)", f"\n{text}", flags=re.M)[1 + names.index("encoder")]
    assert encoder.startswith("encoder\n")
    assert re.search(r"^ +3 .*\(encode\)$", encoder, re.M)
    assert "time.sleep" in encoder
    assert "mse_loss" not in encoder


def test_a_part_within_another_counts_there_only(tmp_path):
    profiler = lumen.AdvancedProfiler()

    def inner():
        pass

    with profiler.profile("outer"):
        inner()
        with profiler.profile("inner"):
            inner()
            inner()
        inner()
    counts = {}
    for name, profile in profiler.profiled_actions.items():
        profile.create_stats()
        counts[name] = {key[2]: calls for key, (calls, *_) in profile.stats.items()}
    assert counts["outer"]["inner"] == counts["inner"]["inner"] == 2


def test_advanced_profile_options_limit_functions_and_files(tmp_path):
    profiler = lumen.AdvancedProfiler(tmp_path / "out", "perf", line_count_restriction=1, dump_stats=True)
    quiet_trainer(tmp_path, max_steps=1, profiler=profiler).fit(Encoding(), loader())
    text = (tmp_path / "out/fit-perf.txt").read_text()
    assert "\nencoder\n" in f"\n{text}"
    assert "due to restriction <1>" in text
    assert (tmp_path / "out/fit-training_step.prof").stat().st_size > 0
    for wrong in (0, 1.5, -1):
        with pytest.raises(ConfigError, match=f"line_count_restriction must be at least 1, .* found {wrong}"):
            lumen.AdvancedProfiler(line_count_restriction=wrong)


def test_neutral_lightning_arguments_are_accepted_others_explained():
    lumen.SimpleProfiler(extended=False)
    lumen.TorchProfiler(emit_nvtx=False, export_to_chrome=True, sort_by_key=None, filename=None, row_limit=3)
    with pytest.raises(ConfigError, match=r"TorchProfiler has no argument sort_by_key\. Leave it out"):
        lumen.TorchProfiler(sort_by_key="cpu_time_total")
