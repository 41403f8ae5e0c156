"""Forks of data workers while no thread of torch is busy: a forked Python 3.11 would inherit a held lock."""

import ctypes
import hashlib
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lumen
from tests.helpers.tasks import FEATURES, Regression, bare_trainer

AT_WORK_S = 0.04
SET_NAME = 15  # the constant of prctl


class Thread(lumen.Callback):
    """Callback with a thread named like gloo's, busy outside of Python while the first epoch's workers are forked."""

    def __init__(self):
        self.ended = []
        began_s = time.perf_counter()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)
        self.rounds = int(20_000 * AT_WORK_S / (time.perf_counter() - began_s))

    def work(self, begun):
        ctypes.CDLL(None).prctl(SET_NAME, b"pt_gloo_test", 0, 0, 0)
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", self.rounds)  # without the GIL
        self.ended.append(True)

    def on_train_epoch_start(self, trainer, task):
        if trainer.current_epoch == 0:
            begun = threading.Event()
            threading.Thread(target=self.work, args=(begun,)).start()
            begun.wait()


class Seen(Dataset):
    """Data set that records whether the thread had ended when this worker was forked."""

    def __init__(self, ended):
        self.ended = ended

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(FEATURES), torch.tensor([float(bool(self.ended))])


class Noting(Regression):
    def training_step(self, batch):
        self.noted = bool(batch[1].all())
        return super().training_step(batch)


def fit(folder):
    thread, task = Thread(), Noting()
    trainer = bare_trainer(folder, strategy="auto", max_steps=1, callbacks=thread)
    trainer.fit(task, DataLoader(Seen(thread.ended), 2, num_workers=1))
    return task.noted


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python frees the lock in what it forks")
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc tells what threads do")
def test_workers_are_forked_while_gloo_threads_rest(group, tmp_path):
    assert group(1).run(fit, tmp_path) == [True]
    assert group(2).run(fit, tmp_path) == [True, True]
