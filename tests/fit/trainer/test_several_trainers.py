"""Several Trainers in one process: in sequence, nested in hooks, and in threads; nothing is left behind."""

import copy
import gc
import multiprocessing
import os
import re
import signal
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import lumen
from lumen.distributed.stack_dump import SINGLE_SIGNAL
from lumen.errors import ConfigError
from tests.helpers.process_state import find_changes, read_process_state
from tests.helpers.tasks import Drawing, Regression, bare_trainer, loader, quiet_trainer, weights
from tests.helpers.watch import WHERE, fit_until_stuck


class Data(lumen.DataModule):
    """Data set that draws from the global generators for each sample."""

    def train_dataloader(self):
        return DataLoader(Drawing(), 8, shuffle=True)

    def val_dataloader(self):
        return loader(16, 8)

    test_dataloader = predict_dataloader = val_dataloader


class Dropping(Regression):
    def __init__(self):
        super().__init__(dropout=0.3)

    def training_step(self, batch):
        return super().training_step(batch[:2])


def train_dropout_task(path, *, task=None, data=None, **options):
    """Return the parameters of a task with dropout after two epochs over data that draws."""
    task = task or Dropping()
    quiet_trainer(path, **{"max_epochs": 2} | options).fit(task, data or Data())
    return weights(task)


def records(path, name="run"):
    return (path / "runs" / name / "metrics.csv").read_text()


# ---------------------------------------------------------------------- nested in hooks

PLACES = ("on_fit_start", "on_train_batch_start", "on_before_backward", "on_after_backward", "on_validation_start",
          "on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end", "on_step_end",
          "on_step_checkpoint", "on_train_end")  # fmt: skip


class Probing(lumen.Callback):
    """Callback that trains and evaluates another task, with another trainer and seed, in one hook of each kind."""

    def __init__(self, path, place):
        self.path, self.probes, self.built = path, [], Dropping()
        setattr(self, place, self.probe)

    def probe(self, trainer, task, *_):
        probe = copy.deepcopy(self.built)  # building one draws random numbers, or seeds as here
        inner = lumen.Trainer(
            max_epochs=1,
            default_root_dir=self.path,
            name="probe",
            accelerator="cpu",
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        inner.fit(probe, trainer.datamodule)
        inner.predict(probe, trainer.datamodule)
        bare_trainer(self.path, max_steps=1, log_level="INFO").fit(copy.deepcopy(probe), trainer.datamodule)
        self.probes.append(weights(probe))
        assert trainer.datamodule.trainer is trainer
        assert task.trainer is trainer


@pytest.mark.parametrize("place", PLACES)
def test_nested_run_leaves_the_outer_one_unchanged(tmp_path, place):
    few = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, "log_level": "INFO"}
    alone = train_dropout_task(tmp_path / "alone", **few)
    probing = Probing(tmp_path / "probes", place)
    beside = train_dropout_task(tmp_path / "beside", callbacks=[probing], **few)
    assert torch.equal(alone, beside)
    assert records(tmp_path / "alone") == records(tmp_path / "beside")
    assert len(probing.probes) >= 1
    said = (tmp_path / "beside" / "runs" / "run" / "run.log").read_text()
    assert said.count("the run is in") == said.count("finished: ") == 1
    assert "finished: " in (tmp_path / "probes" / "probe" / "run.log").read_text()


def test_running_task_is_rejected_but_not_its_copy(tmp_path):
    class Testing(lumen.Callback):
        def on_train_end(self, trainer, task):
            other = bare_trainer(tmp_path)
            with pytest.raises(ConfigError, match="the CSVLogger is in a run of another Trainer"):
                bare_trainer(tmp_path, logger=trainer.loggers).validate(Regression(), loader(8))
            with pytest.raises(ConfigError, match="the strategy is in a run of another Trainer"):
                bare_trainer(tmp_path, strategy=trainer.strategy).validate(Regression(), loader(8))
            with pytest.raises(ConfigError, match=r"this Regression is in a run of another Trainer. .*copy.deepcopy"):
                other.validate(task, loader(16, 8))
            assert other.validate(copy.deepcopy(task), loader(16, 8))
            assert task.trainer is trainer

    options = {"callbacks": [Testing()], "logger": [lumen.CSVLogger()]}
    bare_trainer(tmp_path, max_steps=1, **options).fit(Regression(), loader())


def test_a_hook_without_gradients_may_train(tmp_path):
    losses = []

    class Probing(lumen.Callback):
        def on_validation_epoch_end(self, trainer, task):
            assert torch.is_inference_mode_enabled()
            probe = Regression()
            bare_trainer(tmp_path, max_epochs=3).fit(probe, loader())
            losses.extend(bare_trainer(tmp_path).validate(probe, loader()))

    bare_trainer(tmp_path, max_steps=1, callbacks=[Probing()]).fit(Regression(), loader(), loader(8, 8))
    plain = Regression()
    bare_trainer(tmp_path, max_epochs=3).fit(plain, loader())
    assert losses[-1] == bare_trainer(tmp_path).validate(plain, loader())[0]


@pytest.mark.parametrize("resets", [False, True], ids=["nested", "reset by Lightning"])
def test_run_is_watched_after_a_nested_one(tmp_path, resets):
    """A data worker can only report its place while the process has a handler of the signal."""
    if resets:
        bare_trainer(tmp_path, max_steps=1).fit(Regression(), loader(8, 8))
        signal.signal(SINGLE_SIGNAL, signal.getsignal(SINGLE_SIGNAL))  # Python does not know the handler.

    class Nesting(lumen.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 1:  # within the long limit of the start
                bare_trainer(tmp_path, max_steps=1).fit(Regression(), loader(8, 8))

    strategy = lumen.SingleDevice("cpu", timeout_s=8.0, startup_timeout_s=60)
    _, (text, *_) = fit_until_stuck(tmp_path, 1, strategy, indices=(13,), callbacks=[Nesting()])
    assert re.search(rf"rank 0 waits for its data worker \d+, which is in user code: \S+{WHERE.pattern}", text)


# ---------------------------------------------------------------------- in sequence


def test_trainers_keep_what_is_theirs_while_others_run(tmp_path):
    first, second = (quiet_trainer(tmp_path / name, max_epochs=1) for name in "ab")
    one, other = Dropping(), Dropping()
    first.fit(one, Data())
    second.fit(other, Data())
    assert (first.global_step, second.global_step) == (5, 5)
    values = first.validate(), second.validate()
    assert values[0] == values[1]
    second.fit(other, Data())
    assert first.validate() == values[0] != second.validate()
    assert (first.run_directory.parent, second.run_directory.name) == (tmp_path / "a" / "runs", "run-2")


# ---------------------------------------------------------------------- in threads


def test_run_in_other_thread_is_identical(tmp_path):
    expected = train_dropout_task(tmp_path / "main")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(train_dropout_task, tmp_path / "thread").result()
    assert torch.equal(found, expected)
    assert records(tmp_path / "thread") == records(tmp_path / "main")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_runs_in_several_threads_take_turns(tmp_path, caplog):
    class LetTheOtherBegin(lumen.Callback):
        def on_train_start(self, trainer, task):
            while "waits until the run of another thread" not in caplog.text:
                threading.Event().wait(0.01)

    expected = train_dropout_task(tmp_path / "alone")
    waiting = {"callbacks": [LetTheOtherBegin()], "log_level": "WARNING"}
    tasks = {name: Dropping() for name in "ab"}  # built in threads, the tasks would draw from the same generators
    with ThreadPoolExecutor(2, "trials") as pool:
        found = [pool.submit(train_dropout_task, tmp_path / name, task=task, **waiting) for name, task in tasks.items()]
        assert all(torch.equal(each.result(), expected) for each in found)
    (said,) = {record.message for record in caplog.records if "waits" in record.message}
    assert re.match("the thread trials_. waits until the run of another thread of this process is over", said)


def test_failing_run_in_thread_does_not_block_others(tmp_path):
    def fail():
        with pytest.raises(ZeroDivisionError):
            bare_trainer(tmp_path, max_steps=1, callbacks=[lumen.LambdaCallback(on_train_start=lambda *_: 1 / 0)]).fit(
                Regression(), loader()
            )
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(each.result() for each in [pool.submit(fail) for _ in range(6)])


# ---------------------------------------------------------------------- in processes of other programs


def trained_in_a_process(path):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    return train_dropout_task(Path(path)).tolist()


@pytest.mark.slow  # each process that is spawned imports torch
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_run_in_process_pool_is_identical(tmp_path, method):
    expected = train_dropout_task(tmp_path / "here").tolist()
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        places = [str(tmp_path / f"{method}-{number}") for number in range(2)]
        assert list(pool.map(trained_in_a_process, places)) == [expected] * 2


def test_forked_process_may_start_a_run(tmp_path):
    codes, expected = [], train_dropout_task(tmp_path / "here")

    class Forking(lumen.Callback):
        def on_train_end(self, trainer, task):
            if (pid := os.fork()) == 0:
                found = False
                try:
                    found = torch.equal(train_dropout_task(tmp_path / "child"), expected)
                finally:
                    os._exit(0 if found else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def fit():  # in a thread that holds the turn, which the child would never get
        bare_trainer(tmp_path, max_steps=1, callbacks=[Forking()]).fit(Regression(), loader())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's warning about forks in a process with threads
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fit).result()
    assert codes == [0]


# ---------------------------------------------------------------------- nothing is left behind


SWITCHES = {
    "deterministic": True, "detect_anomaly": True, "matmul_precision": "medium", "benchmark": True,
    "gc_every_n_steps": 2, "profiler": "simple", "precision": "bf16", "enable_progress_bar": True,
    "enable_model_summary": True, "log_level": {"root": "DEBUG", "some.package": "ERROR"},
}  # fmt: skip


def with_workers():
    return loader(32, 8, num_workers=1, persistent_workers=True)


def interrupt(trainer, *_):
    if trainer.global_step == 2:
        os.kill(os.getpid(), signal.SIGINT)


def stop(trainer, *_):
    if trainer.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def fail(trainer, *_):
    if trainer.global_step == 2:
        raise ZeroDivisionError


def fit(path, **options):
    quiet_trainer(path, **SWITCHES | {"max_epochs": 1} | options).fit(Regression(), with_workers(), with_workers())


def evaluate(path, stage):
    getattr(quiet_trainer(path, **SWITCHES), stage)(Regression(), with_workers())


def fit_around_another(path):
    inner = lumen.LambdaCallback(on_validation_end=lambda *_: fit(path / "inner"))
    fit(path, callbacks=[inner], num_sanity_val_steps=0)


def catch_error(path):
    fit(path, callbacks=[lumen.EarlyStopping("nothing")])


RUNS = {
    "fit": (fit, None),
    "validate": (lambda path: evaluate(path, "validate"), None),
    "test": (lambda path: evaluate(path, "test"), None),
    "predict": (lambda path: evaluate(path, "predict"), None),
    "failed": (lambda path: fit(path, callbacks=[lumen.LambdaCallback(on_train_batch_end=fail)]), ZeroDivisionError),
    "failed while validating": (
        lambda path: fit(path, callbacks=[lumen.LambdaCallback(on_validation_batch_end=fail)], val_check_interval=2),
        ZeroDivisionError,
    ),
    "refused": (catch_error, ConfigError),
    "interrupted": (
        lambda path: fit(path, callbacks=[lumen.LambdaCallback(on_train_batch_end=interrupt)]),
        KeyboardInterrupt,
    ),
    "stopped": (lambda path: fit(path, callbacks=[lumen.LambdaCallback(on_train_batch_end=stop)]), SystemExit),
    "fit around another": (fit_around_another, None),
    "fast_dev_run": (lambda path: fit(path, fast_dev_run=True), None),
}


@pytest.fixture(scope="module")
def warm_process(tmp_path_factory):
    """Run once, so that imports and their side effects are done."""
    fit(tmp_path_factory.mktemp("warm"))
    gc.collect()
    gc.freeze()  # a collection after each run would traverse all imports


@pytest.mark.slow
@pytest.mark.usefixtures("warm_process")
@pytest.mark.parametrize("name", RUNS)
def test_run_leaves_no_trace_in_its_process(tmp_path, name):
    run, error = RUNS[name]
    before, ended = read_process_state(), None
    try:  # not pytest.raises, which keeps the traceback and all failed objects alive
        run(tmp_path)
    except BaseException as exception:
        ended = type(exception)
    assert ended is error
    assert find_changes(before) == {}
