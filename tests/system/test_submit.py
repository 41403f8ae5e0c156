"""`lumen submit`: it checks a command, writes one file in an engine's format, and passes the file to the engine."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from lumen.cli import main
from lumen.tools.submit import engines
from lumen.tools.submit.engines import Job
from tests.helpers import ROOT
from tests.helpers.engine_tasks import CONFIG

FIT = ["--", "fit", "--config", "run.yaml"]
PAGE = (ROOT / "docs/guides/clusters.md").read_text()
# Fields in the documentation of each engine: an unknown name would be refused, or worse, ignored.
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
def project_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def print_file(capsys, *words):
    assert main(["submit", *words, "--dry-run", *FIT]) == 0
    assert {path.name for path in Path().iterdir()} <= {"run.yaml"}
    return capsys.readouterr().out


def catch_error(capsys, *words):
    assert main(["submit", *words]) == 2
    assert {path.name for path in Path().iterdir()} <= {"run.yaml"}
    return capsys.readouterr().err


def check_fields(tree, known, at=""):
    if at in known:
        assert set(tree) <= known[at], at
    for name, value in tree.items():
        if isinstance(value, dict):
            check_fields(value, known, f"{at}.{name}")


def test_slurm_script_is_bash_with_task_per_gpu(capsys):
    text = print_file(capsys, "--on", "slurm", "--nodes", "2", "--gpus-per-node", "8", "--time", "1:00:00")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "8", "8")
    assert (options["time"], options["open-mode"], options["job-name"]) == ("1:00:00", "append", "run")
    assert re.search(r"^srun .* -P -m lumen fit --config run.yaml --trainer.resume auto \|\| code=", text, re.M)


def test_on_cpus_slurm_is_asked_for_no_gpus(capsys):
    text = print_file(
        capsys, "--on", "slurm", "--gpus-per-node", "0", "--tasks-per-node", "2", "--setup", "module load x"
    )
    assert "--gpus-per-node" not in text
    assert "--ntasks-per-node=2\n" in text
    assert "\nmodule load x\n" in text


def test_ray_driver_is_python_with_worker_per_gpu(capsys):
    text = print_file(capsys, "--on", "ray", "--nodes", "2", "--gpus-per-node", "8", "--max-restarts", "5")
    (workers,) = [node.value for node in ast.walk(ast.parse(text)) if getattr(node, "arg", None) == "num_workers"]
    assert workers.value == 16
    assert "FailureConfig(5)" in text


def test_kubernetes_job_has_valid_fields(capsys):
    words = ["--on", "k8s", "--nodes", "2", "--gpus-per-node", "8", "--image", "me/x:1", "--volume", "shared"]
    policy, job = yaml.safe_load_all(print_file(capsys, *words, "--time", "1:00:01", "--gpu", "H100"))
    own = {"matchLabels": {"training.kubeflow.org/job-name": job["metadata"]["name"]}}
    ingress = [{"from": [{"podSelector": own}]}]
    assert policy["spec"] == {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress}
    check_fields(job, K8S)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"][:4] == ["torchrun", "--nproc-per-node=8", "--no-python", "lumen"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3601
    assert job["spec"]["elasticPolicy"]["minReplicas"] == 2


def test_skypilot_task_has_valid_fields_and_valid_bash(capsys):
    words = ["--on", "sky", "--nodes", "2", "--gpus-per-node", "8", "--gpu", "H100", "--setup", "pip install ."]
    task = yaml.safe_load(print_file(capsys, *words, "--image", "me/x:1"))
    check_fields(task, SKY)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    assert task["run"].endswith("--no-python lumen fit --config run.yaml --trainer.resume auto\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm", *FIT, "--trainer.max_epoch", "3"], "max_epoch"),
        (["--on", "slurm", *FIT, "--trainer.devices", "4"], "trainer.devices: found 4"),
        (["--on", "slurm", "--nodes", "2", *FIT, "--trainer.num_nodes", "3"], "trainer.num_nodes: found 3"),
        (["--on", "slurm"], "expected fit or validate or test or predict after --, found no command"),
        (["--on", "slurm", "--", "runs"], "found runs"),
        (["--on", "slurm", "--nodes", "0", *FIT], "--nodes: must be at least 1"),
        (["--on", "slurm", "--time", "12", *FIT], "--time: expected HH:MM:SS"),
        (["--on", "slurm", "--name", "My Run", *FIT], "--name: expected"),
        (["--on", "ray", "--partition", "gpu", *FIT], "--partition: not supported by --on ray"),
        (["--on", "k8s", *FIT], "--image: Kubernetes needs an image"),
        (["--on", "sky", *FIT], "--gpu: SkyPilot needs a kind of GPU"),
        (["--on", "lsf", *FIT], "invalid choice"),
        (["--on", "slurm", "--partition", "a\n#SBATCH -N 9", *FIT], "--partition: expected a word of printable ASCII"),
    ],
)
def test_invalid_arguments_raise_before_writing(words, said, capsys):
    assert said in catch_error(capsys, *words)


def test_missing_engine_names_file_and_command_to_run(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--on", "slurm", *FIT]) == 2
    said = capsys.readouterr().err
    assert "sbatch is not installed. The job is in run.sbatch. Run on a machine with sbatch: sbatch" in said
    assert Path("run.sbatch").read_text().startswith("#!/bin/bash")


def test_engine_gets_file_and_sets_the_exit_code(project_directory, monkeypatch):
    (project_directory / "bin").mkdir()
    (project_directory / "bin/sky").write_text('#!/bin/sh\necho "$@" > asked\nexit 7\n')
    (project_directory / "bin/sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project_directory}/bin:/usr/bin:/bin")
    assert main(["submit", "--on", "sky", "--gpu", "H100", "--file", "mine.yaml", *FIT]) == 7
    assert Path("asked").read_text() == "jobs launch mine.yaml\n"
    assert yaml.safe_load(Path("mine.yaml").read_text())["name"] == "run"


def test_a_file_that_was_edited_is_kept(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["submit", "--on", "slurm"]
    main([*words, *FIT])
    file = Path("run.sbatch")
    edited = file.read_text().replace("srun", "srun --exclusive")
    file.write_text(edited)
    capsys.readouterr()
    assert main([*words, *FIT]) == 2
    said = capsys.readouterr().err
    assert "run.sbatch exists and differs from this job. Submit the existing file: sbatch" in said
    assert file.read_text() == edited
    main([*words, "--overwrite", *FIT])
    main([*words, *FIT])  # the file has this text already
    assert "written: run.sbatch" in capsys.readouterr().err
    assert "--exclusive" not in file.read_text()


def test_a_job_with_a_secret_is_private(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    os.umask(before := os.umask(0o022))
    for number, label in enumerate(["https://a.org", "https://me:hunter2@a.org"]):
        main(["submit", "--on", "slurm", "--file", f"{number}.sbatch", *FIT, f"--trainer.default_root_dir={label}"])
    assert [Path(f"{number}.sbatch").stat().st_mode & 0o777 for number in (0, 1)] == [0o666 & ~before, 0o600]


def run_in_bash(script, program, folder):
    """Return the arguments that a bash script passes to a program."""
    (folder / program).write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (folder / program).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SKYPILOT_NODE_IPS": "1.2.3.4", "SKYPILOT_NUM_NODES": "1"}
    done = subprocess.run(["bash"], input=script.encode(), env=environment, capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def expand_variables(text):
    """Return an argument of a container's command as Kubernetes expands it: `$(NAME)` is a variable, and `$$` a `$`."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else "VARIABLE", text)


def read_job(text):
    """Return the PyTorchJob of a file for Kubernetes, which follows its NetworkPolicy."""
    _, job = yaml.safe_load_all(text)
    return job


READERS = {
    engines.make_slurm_script: lambda text, folder: run_in_bash(text, "srun", folder),
    engines.make_skypilot_task: lambda text, folder: run_in_bash(yaml.safe_load(text)["run"], "torchrun", folder),
    engines.make_ray_program: lambda text, folder: next(
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "COMMAND"
    ),
    engines.make_kubernetes_job: lambda text, folder: [
        expand_variables(word)
        for word in read_job(text)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0][
            "command"
        ]
    ],
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
BYTES = st.binary().filter(lambda word: b"\0" not in word).map(os.fsdecode)


@pytest.mark.parametrize("engine", READERS, ids=lambda engine: engine.__name__)
def test_an_engine_reads_the_words_that_were_given(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")

    @settings(max_examples=60, deadline=None, database=None)
    @given(words=st.lists(TEXTS if engine is engines.make_kubernetes_job else TEXTS | BYTES, max_size=4))
    @example(words=["a\nb", "x\u2028y", "$(HOME) $$(X) ${Y} `z`", "{0} {words}", '"""', "'\\''", "\x85 \t\r"])
    def check(words):
        job = Job("run", tuple(words), 1, 1, 1, 0, "python", "/", image="a/b:1", gpu="H100")
        read = READERS[engine](engine(job), folder)
        assert read[len(read) - len(words) :] == words

    check()


def test_words_reach_the_job_from_the_command_line(capsys):
    word = "a\nb\u2028$(HOME)'"
    assert main(["submit", "--on", "k8s", "--image", "a", "--dry-run", *FIT, f"--trainer.default_root_dir={word}"]) == 0
    job = read_job(capsys.readouterr().out)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert f"--trainer.default_root_dir={word}" in map(expand_variables, container["command"])
    assert main(["submit", "--on", "k8s", "--image", "a", *FIT, "--trainer.default_root_dir=\udcff"]) == 2
    assert "a Kubernetes job is YAML and must be UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("line", re.findall(r"^lumen (submit .*)$", PAGE, re.M))
def test_a_command_of_the_page_prints_its_job(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(line.split()) == 0
    assert "models/gpt.yaml" in capsys.readouterr().out
