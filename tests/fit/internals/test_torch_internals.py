"""Missing private names of torch: Lumen uses another way, or raises one early error with torch's versions.

test_architecture.py checks that all these names are in one package.
"""

import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR
from torch.utils.data._utils import collate, pin_memory

from lumen.distributed.agent import run_workers
from lumen.errors import ConfigError
from lumen.internals import loaders, optimizers, tensors, torch_versions
from tests.helpers import ROOT
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer


def catch_missing_name(name, user):
    """Return the message of the error."""
    tried = re.escape(", ".join(torch_versions.TESTED_VERSIONS))
    return (
        rf"^torch {re.escape(torch.__version__)} has no {name}, which {user} needs. .* with torch {tried}: install one"
    )


def import_again(module):
    """Import a module as a fresh process would."""
    return SimpleNamespace(**runpy.run_path(module.__file__))


class Untouched(Regression):
    def training_step(self, batch):
        pytest.fail("work was done")


def test_readme_and_package_name_the_tested_torch_versions():
    root = ROOT
    minor = [version.rpartition(".")[0] for version in torch_versions.TESTED_VERSIONS]
    *others, last = minor
    assert f"torch {', '.join(others)} and {last}" in (root / "README.md").read_text()
    assert f'"torch>={minor[0]}"' in (root / "pyproject.toml").read_text()
    assert f"\nTORCH ?= {torch_versions.TESTED_VERSIONS[-1]}\n" in (root / "Makefile").read_text()
    assert (
        re.search(r"^torch==(.*)$", (root / "constraints.txt").read_text(), re.M)[1] in torch_versions.TESTED_VERSIONS
    )


# ---------------------------------------------------------------------- one error


@pytest.mark.parametrize(
    ("module", "owner", "name", "said"),
    [
        (tensors, torch, "_foreach_norm", "_foreach_norm"),
        (optimizers, LRScheduler, "_update_lr", "_update_lr"),
        (tensors, torch.utils._python_dispatch, "TorchDispatchMode", "_python_dispatch.TorchDispatchMode"),
    ],
)
def test_missing_torch_internals_raise_on_import(monkeypatch, module, owner, name, said):
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=catch_missing_name(said, "Lumen")):
        import_again(module)


@pytest.mark.parametrize(
    ("owner", "name", "options", "user"),
    [
        (torch._dynamo.exc, "TorchRuntimeError", {"compile": True}, "compile"),
        (dist.Reducer, "_rebuild_buckets", {"strategy": "ddp"}, "strategy: ddp"),
        (FSDPModule, "_get_fsdp_state", {"strategy": "fsdp"}, "strategy: fsdp"),
    ],
)
def test_optional_torch_internals_are_checked_before_training(tmp_path, monkeypatch, owner, name, options, user):
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=catch_missing_name(name, user)):
        quiet_trainer(tmp_path, max_steps=1, **options).fit(Untouched(), loader())


def test_timeout_setter_is_checked_before_connecting(tmp_path, monkeypatch):
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout")
    with pytest.raises(ConfigError, match=catch_missing_name("_set_pg_timeout", "a run of several processes")):
        quiet_trainer(tmp_path, max_steps=1, strategy="ddp").fit(Untouched(), loader())
    assert not dist.is_initialized()


def test_the_launcher_looks_before_it_starts_anybody(tmp_path, monkeypatch):
    monkeypatch.delattr(LocalElasticAgent, "_monitor_workers")
    monkeypatch.delattr(SimpleElasticAgent, "_monitor_workers")
    monkeypatch.setattr(LocalElasticAgent, "__abstractmethods__", frozenset())
    with pytest.raises(ConfigError, match=catch_missing_name("_monitor_workers", "the launcher")):
        run_workers(1, ["-c", f"open({str(tmp_path / 'started')!r}, 'w')"], tmp_path, [])
    assert not (tmp_path / "started").exists()


def test_pin_memory_is_checked_before_reading(monkeypatch):
    monkeypatch.delattr(pin_memory, "pin_memory")
    with pytest.raises(ConfigError, match=catch_missing_name("_utils.pin_memory.pin_memory", "pin_memory")):
        loaders.get_pin_function()


# ---------------------------------------------------------------------- replacements


@pytest.mark.parametrize("name", ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"])
def test_optimizer_step_keeps_wrapper_when_hooks_are_unknown(monkeypatch, name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    assert import_again(optimizers).get_unwrapped_step(optimizer) != optimizer.step
    monkeypatch.delattr(sys.modules["torch.optim.optimizer"], name)
    assert import_again(optimizers).get_unwrapped_step(optimizer) == optimizer.step


def test_unknown_collate_falls_back_to_torch(monkeypatch):
    assert import_again(loaders).has_default_collate()
    monkeypatch.delattr(collate, "collate_int_fn")
    assert not import_again(loaders).has_default_collate()


def test_schedules_whose_parts_are_unknown_are_not_checked():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    scheduler = SequentialLR(optimizer, [ConstantLR(optimizer), ConstantLR(optimizer)], milestones=[2])
    assert len(optimizers.get_inner_schedules(scheduler)[0]) == 2
    del scheduler._schedulers
    assert optimizers.get_inner_schedules(scheduler) == ([], [2])


def test_public_set_timeout_is_used_where_available(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(dist, "set_timeout", lambda timeout, group: asked.append(timeout), raising=False)
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout")
    bare_trainer(tmp_path, max_steps=1, strategy="ddp").fit(Regression(), loader())
    assert asked
