"""Files of `lumen submit`: they run under a real SLURM, which takes nodes away; the other engines' commands run too."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import ROOT
from tests.helpers.engine_tasks import CONFIG, check_epochs, count_started_steps, read_record
from tests.helpers.jobs import find_free_port
from tests.helpers.slurm import WHY_NOT, run_program, start_cluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(600)]
HERE = {
    **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
FIT = ["fit", "--config", "run.yaml"]


def submit(directory, words, environment=HERE):
    """Return the output of `lumen submit` for the config."""
    (directory / "run.yaml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "lumen", "submit", *words.split(), "--", *FIT], cwd=directory, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uninterrupted_losses(tmp_path_factory):
    """Return the losses of an uninterrupted run of two processes."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "run.yaml").write_text(CONFIG)
    command = ["torchrun", "--nproc-per-node=2", "--master-port", str(find_free_port()), "-m", "lumen", *FIT]
    subprocess.run(command, cwd=directory, env=HERE, check=True)
    found = read_record(directory)
    check_epochs(found)
    return found


def requeue(slurm, job):
    """Make SLURM end the job and requeue it."""
    subprocess.run(["scontrol", "requeue", job], env=slurm, check=True)


def come_near_the_time_limit(slurm, job):
    """Send the signal that SLURM sends 90 s before the time limit."""
    subprocess.run(["scancel", "--signal=USR1", job], env=slurm, check=True)


def preempt(slurm, job):
    """Submit a job of higher priority that needs the node."""
    command = ["sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(command, env=slurm, check=True, cwd="/tmp")


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize(
    "disturbances",
    [(come_near_the_time_limit, preempt), pytest.param((requeue, preempt, requeue), marks=pytest.mark.torture)],
)
def test_preempted_slurm_job_computes_the_same(disturbances, uninterrupted_losses, tmp_path):
    with start_cluster(tmp_path / "slurm") as environment:
        words = "--on slurm --gpus-per-node 0 --tasks-per-node 2 --partition low"
        said = submit(tmp_path, words, {**HERE, **environment, "LUMEN_TEST_PAUSE_S": "0.1"})
        job = re.search(r"Submitted batch job (\d+)", said)[1]
        show = ("scontrol", "show", "job", job)
        for times, disturb in enumerate(disturbances, 1):
            begun = count_started_steps(tmp_path)
            wait_until(lambda begun=begun: count_started_steps(tmp_path) > begun + 5, "step")
            disturb(environment, job)
            wait_until(lambda times=times: f"Restarts={times}" in run_program(environment, *show), "restart")
        wait_until(lambda: "JobState=COMPLETED" in run_program(environment, *show), f"end of job {job}")
        assert f"Restarts={len(disturbances)}" in run_program(environment, *show)
    (log,) = tmp_path.glob("*.log")
    assert log.read_text().count("stopped at step ") == len(disturbances)
    assert "finished: " in log.read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    found = read_record(tmp_path)
    check_epochs(found)
    assert found == uninterrupted_losses


@pytest.mark.parametrize("engine", ["k8s", "sky"])
def test_engine_command_trains_on_two_nodes(engine, uninterrupted_losses, tmp_path):
    port = find_free_port()
    if engine == "k8s":
        _, job = yaml.safe_load_all(submit(tmp_path, "--on k8s --nodes 2 --gpus-per-node 0 --image x --dry-run"))
        job = job["spec"]
        (container,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        elastic = job["elasticPolicy"]
        variables = {  # as the operator derives them from the policy
            "PET_RDZV_BACKEND": elastic["rdzvBackend"], "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        }  # fmt: skip
        command = shlex.join(container["command"])
    else:
        task = yaml.safe_load(submit(tmp_path, "--on sky --nodes 2 --gpus-per-node 0 --dry-run"))
        command = task["run"].replace(":29400", f":{port}")
        variables = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    nodes = [subprocess.Popen(["bash", "-c", command], cwd=tmp_path, env={**HERE, **variables}) for _ in range(2)]
    assert [node.wait(120) for node in nodes] == [0, 0]
    found = read_record(tmp_path)
    check_epochs(found)
    assert found == uninterrupted_losses


def test_submitit_function_trains_as_the_command(uninterrupted_losses, tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    (program,) = re.findall(r"```python\n(import submitit.*?)```", (ROOT / "docs/guides/clusters.md").read_text(), re.S)
    (tmp_path / "program.py").write_text(program.replace('"submitit")', '"submitit", cluster="local")'))
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=HERE, check=True)
    found = read_record(tmp_path)
    check_epochs(found)
    assert found == uninterrupted_losses
