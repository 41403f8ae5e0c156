"""DeviceStatsMonitor: memory and load, in a record of each run."""

import sys

import pytest
import torch

import lumen
from lumen.callbacks.monitors import _CUDA_QUERIES, _measure_cuda
from lumen.errors import ConfigError
from tests.helpers.tables import read_rows
from tests.helpers.tasks import Regression, loader, quiet_trainer, weights

HOST = ["cpu_percent", "cpu_vm_percent", "cpu_swap_percent"]


def fit(tmp_path, *monitors, **options):
    task = Regression()
    callbacks = [*monitors, lumen.LambdaCallback()]
    trainer = quiet_trainer(tmp_path, max_steps=9, log_every_n_steps=4, callbacks=callbacks, **options)
    trainer.fit(task, loader())
    return trainer, task


def rows(trainer, file="system.csv"):
    return read_rows(trainer.run_directory / file)


def test_cpu_stats_are_recorded_at_each_logged_step(tmp_path):
    trainer, task = fit(tmp_path, lumen.DeviceStatsMonitor())
    found = [row for row in rows(trainer) if row["cpu_percent"]]
    assert [row["step"] for row in found] == ["4", "8"]
    assert all(0 <= float(row[name]) <= 100 for row in found for name in HOST)
    assert all(float(row["cpu_vm_percent"]) > 0 for row in found)
    assert not any(name.startswith("cpu") for row in rows(trainer, "metrics.csv") for name in row)
    _, without = fit(tmp_path / "without")
    assert torch.equal(weights(task), weights(without))


def test_cpu_run_without_cpu_stats_records_nothing(tmp_path):
    trainer, _ = fit(tmp_path, lumen.DeviceStatsMonitor(cpu_stats=False))
    assert not any(name.startswith("cpu") for name in rows(trainer)[0])


def test_psutil_is_required_only_for_cpu_stats(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    fit(tmp_path, lumen.DeviceStatsMonitor(cpu_stats=False))
    for asked in (None, True):
        with pytest.raises(ConfigError, match=r"of the CPU, needs psutil.*pip install 'lumen-train\[stats\]'"):
            fit(tmp_path, lumen.DeviceStatsMonitor(asked))


def test_cuda_stats_use_names_of_torch_memory_stats():
    """Nothing is counted before CUDA is used; `tests/system/test_cuda.py` tests the counts of a device."""
    kinds = {key.partition(".")[0] for key, _ in _CUDA_QUERIES.values()}
    assert all(f'"{kind}' in torch.cuda.memory_stats.__doc__ for kind in kinds)
    assert _measure_cuda(torch.device("cuda")) == dict.fromkeys(_CUDA_QUERIES, 0.0)
