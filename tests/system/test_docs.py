"""Documentation: its code and commands work as shown."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.programs import run_python

README = (ROOT / "README.md").read_text()


COMMANDS = (ROOT / "docs/guides/command-line.md").read_text()


def find_blocks(language, page):
    return re.findall(rf"```{language}\n(.*?)```", page, re.S)


def test_readme_script_trains_and_finds_its_finished_run(tmp_path):
    (script,) = find_blocks("python", README)
    (tmp_path / "train.py").write_text(script)
    for said in ("finished: ", "nothing to do"):
        _, errors = run_python("-W", "error", "train.py", cwd=tmp_path)
        assert said in errors
    assert float((tmp_path / "runs/regression/metrics.csv").read_text().split(",")[-1]) < 1


DEVICES = {page: (ROOT / f"docs/guides/{page}.md").read_text() for page in ("multi-gpu", "fsdp", "debug-a-hang")}


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("config", [find_blocks("yaml", page)[0] for page in DEVICES.values()], ids=[*DEVICES])
def test_a_config_for_several_devices_trains_the_gpt(config, tmp_path):
    (tmp_path / "more.yaml").write_text(config)
    words = ["lumen", "fit", "--config", "models/gpt.yaml", "--config", str(tmp_path / "more.yaml")]
    _run_in_checkout([*words, "--trainer.max_steps=2", "--trainer.limit_val_batches=2"], tmp_path)


def test_multi_gpu_script_runs_on_two_processes(tmp_path):
    (script,) = find_blocks("python", DEVICES["multi-gpu"])
    (tmp_path / "train.py").write_text(script)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert len(re.findall("^val_loss [0-9.]+$", done.stdout, re.M)) == 1
    assert len([*tmp_path.glob("runs/*/logs/*rank*")]) == 2, [*tmp_path.rglob("*")]


@pytest.mark.parametrize("number", [0, 1])
def test_scripts_of_the_mesh_page_run(tmp_path, number):
    (tmp_path / "train.py").write_text(find_blocks("python", (ROOT / "docs/guides/mesh.md").read_text())[number])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished: max_epochs=" in done.stderr


def _run_in_checkout(words, tmp_path):
    """Run a command line with the programs of this environment, on small models and short texts."""
    words[:1] = [str(Path(sys.executable).with_name(words[0]))]
    words += ["--model.preset=gpt-nano", f"--trainer.default_root_dir={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished: max_steps=2" in done.stderr


def test_every_linked_file_exists():
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def train_digits_with(config, folder):
    """Train two steps of an example with a config of the page on commands; return the run's config."""
    (folder / "more.yaml").write_text(config)
    words = ["--config", "models/digits.yaml", "--config", str(folder / "more.yaml")]
    small = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", f"--trainer.default_root_dir={folder}"]
    assert main(["fit", *words, *small]) == 0
    return (folder / "digits/config.yaml").read_text()


def test_configs_of_commands_page_train_on_an_example(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    one, several = find_blocks("yaml", COMMANDS)
    saved = train_digits_with(one, tmp_path)
    assert "class_path: torch.optim.AdamW" in saved
    assert "interval: step" in saved
    shutil.rmtree(tmp_path / "digits")
    saved = train_digits_with(several, tmp_path)
    assert "ExponentialLR" in saved
    assert "ReduceLROnPlateau" in saved


def test_commands_of_check_page_run_and_names_exist(tmp_path, monkeypatch):
    page = (ROOT / "docs/guides/check.md").read_text()
    for entry in ("models", "datamodules"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    commands = [line.split() for line in page.splitlines() if line.startswith("lumen ")]
    assert [main(command[1:]) for command in commands] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["datamodules", "models"]
    table = page.split("## Findings")[1].split("##")[0]
    named = {name for row in table.splitlines()[4:] for name in re.findall(r"`([\w.]+)`", row.rpartition("| ")[2])}
    code = "".join(path.read_text() for path in (ROOT / "lumen/tools/check").glob("*.py"))
    code = code.replace("{role}", "training") + code.replace("{role}", "validation")
    assert [name for name in named if f'"{name}"' not in code] == []
    assert len(named) > 30
