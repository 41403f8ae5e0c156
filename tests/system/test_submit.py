"""`lumen submit` checks a command, writes one file in the words of an engine, and gives it to that."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.engine_tasks import CONFIG

FIT = ["--", "fit", "--config", "run.yaml"]
PAGE = (ROOT / "docs/clusters.md").read_text()
# What the documentation of each has: a name that is no field of it would be refused, or worse, not be read.
K8S = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    ".spec": {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs"},
    ".spec.runPolicy": {"cleanPodPolicy", "backoffLimit", "activeDeadlineSeconds"},
    ".spec.elasticPolicy": {"rdzvBackend", "minReplicas", "maxReplicas", "maxRestarts"},
    ".spec.pytorchReplicaSpecs": {"Worker"},
    ".spec.pytorchReplicaSpecs.Worker": {"replicas", "restartPolicy", "template"},
    ".spec.pytorchReplicaSpecs.Worker.template.spec": {
        "terminationGracePeriodSeconds", "containers", "volumes", "nodeSelector",
    },
}  # fmt: skip
SKY = {
    "": {"name", "workdir", "num_nodes", "resources", "setup", "run"},
    ".resources": {"accelerators", "image_id", "job_recovery"},
    ".resources.job_recovery": {"max_restarts_on_errors"},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def printed(capsys, *words):
    assert main(["submit", *words, "--dry-run", *FIT]) == 0
    assert {path.name for path in Path().iterdir()} <= {"run.yaml"}
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main(["submit", *words]) == 2
    assert {path.name for path in Path().iterdir()} <= {"run.yaml"}
    return capsys.readouterr().err


def check_fields(tree, known, at=""):
    if at in known:
        assert set(tree) <= known[at], at
    for name, value in tree.items():
        if isinstance(value, dict):
            check_fields(value, known, f"{at}.{name}")


def test_the_script_of_slurm_has_a_task_per_gpu_and_is_one_that_bash_reads(capsys):
    text = printed(capsys, "--on", "slurm", "--nodes", "2", "--gpus-per-node", "8", "--time", "1:00:00")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "8", "8")
    assert (options["time"], options["open-mode"], options["job-name"]) == ("1:00:00", "append", "run")
    assert re.search(r"^srun .* -m lumen fit --config run.yaml --trainer.resume auto \|\| code=", text, re.M)


def test_on_cpus_slurm_is_asked_for_no_gpus(capsys):
    text = printed(capsys, "--on", "slurm", "--gpus-per-node", "0", "--tasks-per-node", "2", "--setup", "module load x")
    assert "--gpus-per-node" not in text
    assert "--ntasks-per-node=2\n" in text
    assert "\nmodule load x\n" in text


def test_the_driver_of_ray_is_a_program_with_a_worker_per_gpu(capsys):
    text = printed(capsys, "--on", "ray", "--nodes", "2", "--gpus-per-node", "8", "--max-restarts", "5")
    (workers,) = [node.value for node in ast.walk(ast.parse(text)) if getattr(node, "arg", None) == "num_workers"]
    assert workers.value == 16
    assert "FailureConfig(5)" in text


def test_the_job_of_kubernetes_has_fields_that_there_are(capsys):
    words = ["--on", "k8s", "--nodes", "2", "--gpus-per-node", "8", "--image", "me/x:1", "--volume", "shared"]
    job = yaml.safe_load(printed(capsys, *words, "--time", "1:00:01", "--gpu", "H100"))
    check_fields(job, K8S)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"][:4] == ["torchrun", "--nproc-per-node=8", "-m", "lumen"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3601
    assert job["spec"]["elasticPolicy"]["minReplicas"] == 2


def test_the_task_of_skypilot_has_fields_that_there_are_and_a_command_that_bash_reads(capsys):
    words = ["--on", "sky", "--nodes", "2", "--gpus-per-node", "8", "--gpu", "H100", "--setup", "pip install ."]
    task = yaml.safe_load(printed(capsys, *words, "--image", "me/x:1"))
    check_fields(task, SKY)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    assert task["run"].endswith("-m lumen fit --config run.yaml --trainer.resume auto\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm", *FIT, "--trainer.max_epoch", "3"], "max_epoch"),
        (["--on", "slurm", *FIT, "--trainer.devices", "4"], "trainer.devices: 4 asked for"),
        (["--on", "slurm", "--nodes", "2", *FIT, "--trainer.num_nodes", "3"], "trainer.num_nodes: 3 asked for"),
        (["--on", "slurm"], "expected fit or validate or test or predict after --, there is none"),
        (["--on", "slurm", "--", "runs"], "found runs"),
        (["--on", "slurm", "--nodes", "0", *FIT], "--nodes: must be at least 1"),
        (["--on", "slurm", "--time", "12", *FIT], "--time: expected HH:MM:SS"),
        (["--on", "slurm", "--name", "My Run", *FIT], "--name: expected"),
        (["--on", "ray", "--partition", "gpu", *FIT], "--partition: not for --on ray"),
        (["--on", "k8s", *FIT], "--image: Kubernetes needs one"),
        (["--on", "sky", *FIT], "--gpu: SkyPilot must know the kind"),
        (["--on", "lsf", *FIT], "invalid choice"),
    ],
)
def test_what_is_wrong_is_an_error_before_anything_is_written(words, said, capsys):
    assert said in refused(capsys, *words)


def test_without_the_engine_the_error_says_where_the_file_is_and_what_to_run(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--on", "slurm", *FIT]) == 2
    assert "sbatch is not installed here. The job is in run.sbatch. Where it is, run: sbatch" in capsys.readouterr().err
    assert Path("run.sbatch").read_text().startswith("#!/bin/bash")


def test_the_file_is_given_to_the_engines_own_program_whose_exit_code_counts(here, monkeypatch):
    (here / "bin").mkdir()
    (here / "bin/sky").write_text('#!/bin/sh\necho "$@" > asked\nexit 7\n')
    (here / "bin/sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin:/usr/bin:/bin")
    assert main(["submit", "--on", "sky", "--gpu", "H100", "--file", "mine.yaml", *FIT]) == 7
    assert Path("asked").read_text() == "jobs launch mine.yaml\n"
    assert yaml.safe_load(Path("mine.yaml").read_text())["name"] == "run"


@pytest.mark.parametrize("line", re.findall(r"^lumen (submit .*)$", PAGE, re.M))
def test_a_command_of_the_page_prints_its_job(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(line.split()) == 0
    assert "models/gpt.yaml" in capsys.readouterr().out
