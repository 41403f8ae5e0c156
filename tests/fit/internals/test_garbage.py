"""Garbage collections during a run."""

import gc
import os
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lumen
from lumen.errors import ConfigError
from lumen.internals.garbage import collect_in_worker, collect_young_only, pause_automatic_collection
from tests.helpers.garbage import Untidy, watch_collections
from tests.helpers.tasks import Regression, Saving, Seeing, bare_trainer, loader

FROZEN_BY_PYTHON, THRESHOLDS = gc.get_freeze_count(), gc.get_threshold()


def test_concurrent_gc_pauses_restore_the_threshold():
    before = gc.get_threshold()
    one, other = collect_young_only(), collect_young_only()
    one.__enter__()
    other.__enter__()
    assert gc.get_threshold()[2] > 1_000_000
    one.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 1_000_000
    other.__exit__(None, None, None)
    assert gc.get_threshold() == before


@pytest.fixture
def recorded_collections():
    with watch_collections() as (seen, noted):
        yield seen, noted


@pytest.mark.slow
def test_garbage_is_collected_only_at_every_nth_step(tmp_path, recorded_collections):
    seen, noted = recorded_collections
    trainer = bare_trainer(tmp_path, max_steps=9, gc_every_n_steps=3, val_check_interval=100)
    trainer.fit(Untidy(noted), loader())
    assert [found for found in seen if str(found[0]).startswith("step")] == [(f"step {n}", 2) for n in (3, 6, 9)]
    assert gc.isenabled()
    assert gc.get_freeze_count() <= FROZEN_BY_PYTHON


@pytest.mark.slow
def test_without_it_python_collects_when_it_wants_to(tmp_path, recorded_collections):
    seen, noted = recorded_collections
    bare_trainer(tmp_path, max_steps=9, val_check_interval=100).fit(Untidy(noted), loader())
    assert len([found for found in seen if str(found[0]).startswith("step")]) > 9


@pytest.mark.slow
def test_evaluations_count_their_batches(tmp_path, recorded_collections):
    seen, noted = recorded_collections
    data = loader(56, 8, shuffle=False)  # 7 batches
    trainer = bare_trainer(tmp_path, max_steps=2, gc_every_n_steps=3, val_check_interval=1, num_sanity_val_steps=0)
    trainer.fit(Untidy(noted), loader(), val_dataloaders=data)
    assert [generation for where, generation in seen if where == "validation"] == [2] * 4
    bare_trainer(tmp_path, gc_every_n_steps=3).test(Untidy(noted), data)
    assert [generation for where, generation in seen if where == "test"] == [2] * 2
    assert gc.isenabled()


@pytest.mark.slow
def test_it_is_restored_after_an_error(tmp_path, recorded_collections):
    class Failing(Regression):
        def training_step(self, batch):
            assert not gc.isenabled()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bare_trainer(tmp_path, max_steps=2, gc_every_n_steps=5).fit(Failing(), loader())
    assert gc.isenabled()
    assert gc.get_freeze_count() <= FROZEN_BY_PYTHON


@pytest.mark.slow
def test_disabled_gc_stays_disabled_and_frozen_objects_remain(tmp_path, recorded_collections):
    gc.disable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    bare_trainer(tmp_path, max_steps=2, gc_every_n_steps=1).fit(Regression(), loader())
    assert not gc.isenabled()
    assert 0 < gc.get_freeze_count() <= frozen


class Asking(Dataset):
    """Data set that returns whether the reading process collects garbage, and its id."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([gc.isenabled(), os.getpid() != PROCESS]), torch.zeros(1)


PROCESS = os.getpid()


@pytest.mark.slow
def test_workers_of_the_loader_go_on_collecting(tmp_path, recorded_collections):
    class Looking(lumen.TaskModule):
        answers = None

        def training_step(self, batch):
            assert not gc.isenabled()
            self.answers = batch[0]
            return self.weight.square()

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task = Looking()
    bare_trainer(tmp_path, max_steps=1, gc_every_n_steps=1).fit(task, DataLoader(Asking(), 4, num_workers=1))
    assert task.answers.all()


def test_gc_setting_changes_no_result(tmp_path):
    plain, tidy, resumed = Regression(dropout=0.2), Regression(dropout=0.2), Regression(dropout=0.2)
    bare_trainer(tmp_path, max_steps=8).fit(plain, loader())
    bare_trainer(tmp_path, max_steps=8, gc_every_n_steps=2, callbacks=Saving(4, tmp_path / "step-4")).fit(
        tidy, loader()
    )
    bare_trainer(tmp_path, max_steps=8, resume=tmp_path / "step-4").fit(resumed, loader())
    for one, two, three in zip(plain.parameters(), tidy.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_the_interval_must_be_positive():
    with pytest.raises(ConfigError, match="gc_every_n_steps: must be at least 1, found 0"):
        lumen.Trainer(max_steps=1, gc_every_n_steps=0)


def test_imports_leave_the_thresholds_as_they_were(tmp_path):
    before = gc.get_threshold()
    bare_trainer(tmp_path, max_steps=1).fit(Regression(), loader())
    assert gc.get_threshold() == before


class Heavy:
    """Object in a reference cycle that records the process which frees it, so freeing it takes a collection."""

    def __init__(self, path):
        self.itself, self.path = self, path

    def __del__(self):
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Dataset):
    """Data set that makes garbage and collects it in the reading process."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 8

    def __getitem__(self, index):
        Heavy(self.path)
        gc.collect()
        return torch.zeros(6), torch.tensor([float(os.getpid())])


class Streamed(Collecting, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(8))


@pytest.mark.parametrize("data", [Collecting, Streamed])
def test_workers_free_only_garbage_they_made(tmp_path, data):
    """A CUDA event is such garbage, and aborts the worker that frees it."""
    task, inherited, own = Seeing(), tmp_path / "inherited", tmp_path / "own"
    gc.collect()
    gc.set_threshold(0)  # no collection in this process
    try:
        for _ in range(20):
            Heavy(inherited)
        bare_trainer(tmp_path, max_epochs=2).fit(task, DataLoader(data(own), 4, num_workers=1))
        gc.collect()
    finally:
        gc.set_threshold(*THRESHOLDS)
    workers = {int(number) for epoch in (0, 1) for number in torch.cat([y for _, y in task.epochs[epoch]])}
    assert {int(line) for line in own.read_text().splitlines()} == workers - {os.getpid()}
    assert inherited.read_text().split() == [str(os.getpid())] * 20


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("pause", [collect_young_only, pause_automatic_collection])
def test_worker_forked_during_a_pause_collects_as_usual(pause):
    """Another thread, such as one that saves, is in the context while the worker is forked."""
    usual, inside, over = gc.get_threshold(), threading.Event(), threading.Event()

    def save():
        with pause():
            inside.set()
            over.wait()

    thread = threading.Thread(target=save)
    thread.start()
    inside.wait()
    if (worker := os.fork()) == 0:
        collect_in_worker()
        with collect_young_only():
            pass
        os._exit(0 if gc.get_threshold() == usual else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    over.set()
    thread.join()
    assert (code, gc.get_threshold()) == (0, usual)
