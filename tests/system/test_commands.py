"""Documented commands: every command in configs, pages, docstrings and output of runs works."""

import re
import shlex
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

from lumen.cli import main
from lumen.cli.commands import list_commands
from tests.helpers import OF_TORCHVISION, ROOT
from tests.helpers.documented_commands import (
    SHORT,
    SOURCES,
    complete_command,
    find_commands,
    find_options,
    make_environment,
    make_home,
    run_command,
    run_in_shell,
    train,
)

pytestmark = pytest.mark.usefixtures("program_directory")

#: Commands that cannot run here, with the reason or the test that runs them.
NOT_RUN = {
    r"(#SBATCH .*\n)?(sbatch|scontrol|srun) .*": "SLURM: test_engines.py",
    r"kubectl .*": "Kubernetes",
    r"sky .*|torchrun .*SKYPILOT.*": "SkyPilot",
    r"ray .*|python gpt.ray.py": "a cluster of Ray: test_ray.py",
    r"source env/bin/activate": "an environment on a cluster",
    r".*(s3://|store.yaml).*": "a bucket: test_remote.py",
    r".*--data.root download": "a download: test_download.py",
    r".* --config models/gpt_mesh.yaml.*": "four processes: test_models.py",
    r"wandb sync.*": "an account of W&B",
    r"aim up .*": "a repository of Aim: test_aim.py",
    r"mlflow ui .*": "the server of MLflow",
    r"lumen .* --format onnx.*": "the packages onnx and onnxscript",
    r"lumen verify .*": "several minutes: test_verify.py",
    r"python -m benchmarks .*": "several minutes on an idle machine: test_benchmarks.py",
    r".*lumen completion .*": "shells and shtab: test_completion.py",
    r"python train.py.*|cd runs && .*": "the script of its page: test_command_line_page.py",
    r"(.* )?python sweep.py": "the script of its page: test_sweeps_page.py",
    r"python digits.py": "the script of its page: test_first_pages.py",
    r"cd (mine|my-project|images)|lumen init (mine --template table|images .*)": "a new project: test_first_pages.py",
    r"lumen \w+ --config (images.yaml|runs/images/config.yaml) .*": "a new project: test_first_pages.py",
    r"cd first|lumen (fit --config first.yaml|(report|export) runs/first.*)": "a new project: test_wheel.py",
    r"lumen .*\b(sums.yaml|runs/sums)\b.*|python base.py|torchrun .* train.py": "files of its page: test_tutorials.py",
    r"(lumen migrate|git apply)( .*)?": "a project of Lightning: test_migrate.py",
    r"lumen submit .* --dry-run --": "the beginning of an example: test_example_in_help_of_a_command_runs",
    r"lumen COMMAND|python -m lumen.distributed.launch.*": "a form of several commands",
    r"python -m torch.distributed.launch|torchrun (--max-restarts( 3)?|--standalone)": "the beginning of a command",
    r"lumen fit --config models/gpt.yaml --trainer.global_batch_size 24 --trainer.devices 2.*": "test_same_gpt.py",
    r"torchrun .* --max-restarts 3 -m lumen .*models/mingpt.yaml": "test_device_examples.py, with restarts",
    r"lumen fit --config models/digits_ddp.yaml --trainer.devices 2": "test_device_examples.py",
    r"(python -m torch.distributed.launch|torchrun --nproc-per-node 2|CUDA_VISIBLE_DEVICES=2,3)"
    r"( -m)? lumen fit( \.\.\.| --trainer.devices 2)": "a short form of a command with --nproc-per-node or a config",
}
NAME = "lumen (?!runs)[a-z]+"
SERVER = "tensorboard .*"
SEVERAL_MACHINES = "torchrun .*--nnodes.*"
LAUNCHER = r"(?!torchrun .*--nnodes).*(--trainer\.devices 2|torchrun|torch\.distributed\.launch|-m pdb)( .*)?"

SOURCE = {line: source for source in reversed(SOURCES) for line in find_commands(source)}
EXAMPLES = [name for name in SOURCES if name.endswith(".yaml") and name[7:-5] not in OF_TORCHVISION]


def is_not_run(line):
    return any(re.fullmatch(pattern, line, re.S) for pattern in NOT_RUN)


def select(pattern):
    return [line for line in SOURCE if re.fullmatch(pattern, line, re.S) and not is_not_run(line)]


QUICK = {}
for _name in SOURCES:
    for _line in find_commands(_name):
        special = re.fullmatch(f"{NAME}|{SERVER}|{SEVERAL_MACHINES}|{LAUNCHER}|(make|pip) .*", _line)
        if SOURCE[_line] == _name and not special and not is_not_run(_line) and _name[7:-5] not in OF_TORCHVISION:
            QUICK.setdefault(_name, {})[_line] = None


@pytest.mark.filterwarnings("ignore:The ``noload`` loader")  # a warning of SQLAlchemy, which MLflow uses
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("source", QUICK)
def test_commands_of_a_file_run(source, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    make_home(tmp_path)
    for line in QUICK[source]:
        run_command(line)


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("line", select(LAUNCHER), ids=SOURCE.get)
def test_commands_that_start_processes_run(line, tmp_path):
    make_home(tmp_path)
    before = "printf 'continue\\nquit\\n' | " if "-m pdb" in line else ""
    after = [] if "lumen" in line else ["-m", "lumen", "fit", "--config", "models/gpt.yaml"]
    ending = "nothing suspicious was found" if line.startswith("lumen check") else "finished: max_steps=2"
    assert ending in run_in_shell(f"{before}{complete_command(line)} {shlex.join([*after, *SHORT['fit']])}")


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", list_commands())
def test_example_in_help_of_a_command_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    shown = capsys.readouterr().out
    example = shown.splitlines()[-1].removeprefix("Example: ")
    assert re.match(rf"(source <\()?lumen {name}\b", example)
    assert max(map(len, shown.splitlines())) <= 80
    make_home(tmp_path)
    train("mine")
    if name == "migrate":
        monkeypatch.chdir(tmp_path / "runs")
    if name == "verify":  # All comparisons take minutes.
        example += " --only again"
    run_command(example)


def test_first_command_of_help_makes_a_project(tmp_path, monkeypatch, capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert main(["fit"]) == 2
    (first,) = {text.rpartition(" run: ")[2].strip() for text in (shown.out, capsys.readouterr().err)}
    run_command(first)
    monkeypatch.chdir(first.split()[-1])
    assert main(["fit"]) == 2
    (option,) = re.findall(r"Give (--config \S+),", capsys.readouterr().err)
    run_command(f"lumen fit {option}")


def test_every_example_shows_its_command():
    assert [name for name in EXAMPLES if not any(f"--config {name}" in line for line in find_commands(name))] == []


@pytest.mark.parametrize("name", [name for name in EXAMPLES if find_options(name)])
def test_options_that_a_config_offers_are_taken(name, tmp_path):
    make_home(tmp_path)
    for options in find_options(name):
        if "--trainer.devices" not in options and not is_not_run(options):
            run_command(f"lumen fit --config {name} {options}")


@pytest.mark.slow
@pytest.mark.parametrize("line", select(SERVER), ids=SOURCE.get)
def test_servers_that_pages_name_start(line, tmp_path):
    make_home(tmp_path)
    words = ["bash", "-c", f"exec {line} --port 0"]
    with subprocess.Popen(
        words, env=make_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert any("http://" in said for said in server.stdout)
        server.terminate()


@pytest.mark.parametrize("line", select(SEVERAL_MACHINES), ids=SOURCE.get)
def test_commands_for_several_machines_are_understood(line, tmp_path, capsys):
    make_home(tmp_path)
    words = shlex.split(complete_command(line))
    given = get_args_parser().parse_args(words[1:] + ["-m", "lumen"] * ("-m" not in words))
    assert int(given.nnodes) > 1
    assert given.module
    if given.training_script_args:
        assert main([*given.training_script_args, "--print_config"]) == 0


def test_names_of_commands_are_known():
    assert {line.split()[1] for line in select(NAME)} <= {*list_commands()}


def test_targets_of_make_exist():
    for line in select("make .*"):
        run_in_shell(f"make --dry-run --directory {ROOT} {line.removeprefix('make ')}")


def test_packages_to_install_are_in_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {project["name"]} | {Requirement(each).name for names in extras.values() for each in names}
    for line in select("pip install .*"):
        for word in shlex.split(re.sub(r" (-e|--constraint \S+)(?= |$)", "", line))[2:]:
            wanted = Requirement(word.replace(".", project["name"], 1) if word.startswith(".") else word)
            assert (wanted.name in known, wanted.extras - extras.keys()) == (True, set()), line


def test_commands_that_cannot_run_here_are_bash():
    lines = [*SOURCE, *(each for name in EXAMPLES for each in find_options(name))]
    for pattern, reason in NOT_RUN.items():
        found = [line for line in lines if re.fullmatch(pattern, line, re.S)]
        assert found, pattern
        for line in found:
            subprocess.run(["bash", "-n", "-c", line if line in SOURCE else f"lumen fit {line}"], check=True)
        for test in re.findall(r"test_\w+\.py", reason):
            assert list((ROOT / "tests").rglob(test)), reason


def test_commands_that_a_run_prints_run(tmp_path, capsys):
    make_home(tmp_path)
    assert main(["fit", "--config", "models/digits.yaml", *SHORT["fit"]]) == 0
    printed = re.findall(r"^(?:longer|curves|weights): (lumen .*)", capsys.readouterr().err, re.M)
    assert [line.split()[1] for line in printed] == ["fit", "report", "export"]
    for line in printed:
        run_command(line)
