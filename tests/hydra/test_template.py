"""A project with Hydra for Lightning: after `lumen migrate --write` it trains, resumes and sweeps as before."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import yaml

from tests.helpers import ROOT
from tests.helpers.projects import LIGHTNING, copy_project, lumen
from tests.helpers.tables import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(500)]
SITE = Path(hydra.__file__).parents[1]


def run(folder, *words, variables=(), without=()):
    """Run Python in a folder; modules in `without` cannot be imported."""
    barrier = folder.with_name(f"{folder.name}-without")
    for name in without:
        barrier.mkdir(exist_ok=True)
        (barrier / f"{name}.py").write_text(f"raise ImportError('{name} is not to be used')\n")
    path = os.pathsep.join(map(str, (barrier, folder, ROOT, SITE)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **dict(variables)}
    command, pipes = [sys.executable, *words], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=folder, env=environment, text=True, **pipes)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return the migrated project."""
    folder = copy_project("hydradigits", tmp_path_factory.mktemp("moved") / "project")
    done = lumen(folder, "migrate", ".", "--write")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def train(project, tmp_path):
    """Return a function that trains as a program, with its logs in the test's folder, and returns its output."""

    def call(*words, code=0, before=(), **options):
        words = (*before, "src/train.py", *words, f"paths.log_dir={tmp_path}")
        done = run(project, *words, **options)
        assert done.returncode == code, done.stdout
        return done.stdout

    return call


def read_losses(folder):
    return [row["val/loss"] for row in read_rows(folder / "csv/metrics.csv") if row["val/loss"]]


def list_checkpoints(folder):
    return sorted(each.name for each in (folder / "checkpoints").iterdir() if each.name.startswith("step"))


def test_migrated_project_names_no_lightning(project):
    files = [each for each in project.rglob("*") if each.suffix in (".py", ".yaml")]
    assert len(files) > 25
    assert [each for each in files if LIGHTNING.search(each.read_text())] == []
    assert "filename" not in (project / "configs/callbacks/default.yaml").read_text()
    assert "filename" not in (project / "configs/experiment/wide.yaml").read_text()
    assert yaml.safe_load((project / "configs/trainer/ddp_sim.yaml").read_text())["strategy"] == "ddp"


@pytest.mark.parametrize("moved", [False, True])
def test_projects_own_tests_pass(request, tmp_path, moved):
    folder = request.getfixturevalue("project") if moved else copy_project("hydradigits", tmp_path / "before")
    without = ["lightning", "pytorch_lightning", "lightning_fabric"] if moved else ["lumen"]
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "tests",
    ]
    done = run(folder, *command, without=without)
    assert re.search(r"^9 passed in", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_two_devices_share_one_directory(train, tmp_path, chdir):
    train("trainer=ddp_sim", "trainer.max_epochs=2", f"hydra.job.chdir={chdir}")
    train("trainer.max_epochs=2", "task_name=single")
    (shared,), (single,) = ([*(tmp_path / name / "runs").iterdir()] for name in ("train", "single"))
    assert list_checkpoints(shared) == list_checkpoints(single)
    assert len(read_losses(shared)) == len(read_losses(single)) == 2
    recorded = yaml.safe_load((shared / ".hydra/hydra.yaml").read_text())["hydra"]["runtime"]["output_dir"]
    assert Path(recorded) == shared


def test_two_devices_sweep_in_one_directory(train, tmp_path):
    train("trainer=ddp_sim", "-m", "trainer.max_epochs=1", "hydra.sweep.subdir=lr='${model.optimizer.lr}'", code=2)
    train("-m", "trainer=ddp_sim", "trainer.max_epochs=1", "model.optimizer.lr=0.1,0.01")
    (sweep,) = (tmp_path / "train/multiruns").iterdir()
    assert sorted(each.name for each in sweep.iterdir() if each.is_dir()) == ["0", "1"]
    assert read_losses(sweep / "0") != read_losses(sweep / "1")


def test_run_resumes_with_the_printed_command(project, train, tmp_path):
    whole, cut = (f"hydra.run.dir={tmp_path / name}" for name in ("whole", "cut"))
    train(whole, "trainer.max_epochs=2")
    (advice,) = re.findall("longer: python[^ ]* (.*)", train(cut, "trainer.max_epochs=1"))
    assert run(project, *shlex.split(advice)).returncode == 0
    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")
    path = tmp_path / "cut/checkpoints/step-00000021"
    train(f"hydra.run.dir={tmp_path / 'new'}", "trainer.max_epochs=2", f"ckpt_path={path}")
    assert read_losses(tmp_path / "new") == read_losses(tmp_path / "whole")[1:]


def test_different_directories_of_ranks_are_refused(train, tmp_path):
    said = train(
        "trainer=ddp_sim", f"hydra.run.dir={tmp_path}/rank${{oc.env:RANK}}", code=1,
        before=("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    )  # fmt: skip
    assert f"hydra.run.dir={tmp_path}/rank0 on rank 0, hydra.run.dir={tmp_path}/rank1 on rank 1" in said
    assert "set hydra.run.dir=PATH" in said


def test_optuna_sweeps_the_migrated_project(train, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    train("hparams_search=optuna", "trainer.max_epochs=1")
    (sweep,) = (tmp_path / "train/multiruns").iterdir()
    found = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    assert 0.3 < found["best_value"] <= 1
    assert sorted(each.name for each in sweep.iterdir() if each.is_dir()) == ["0", "1", "2"]
    said = train("hparams_search=optuna", "trainer=ddp_sim", "hydra.sweeper.sampler.seed=null", code=1)
    assert "A sweeper must draw the same values on every rank" in said
