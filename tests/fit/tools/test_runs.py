"""`lumen runs`: the runs, their status and their damage, without a change to any of them."""

import json
import os
import re
import shutil
import threading
import time
from datetime import datetime
from pathlib import Path

import fsspec
import pytest
import torch

from lumen.checkpoint.format.folder import remove_checkpoint
from lumen.checkpoint.format.storage import as_path_or_url
from lumen.cli import main
from lumen.tools.runs.find import list_checkpoints
from lumen.trainer.run_directory import RunDirectory
from tests.helpers import runs
from tests.helpers.checkpoints import FILES, count_read_bytes, save, save_small, tamper_with_manifest
from tests.helpers.runs import ENDINGS, fit, flip

CONFIG = runs.CONFIG


pytestmark = pytest.mark.usefixtures("config_directory")


def read_contents(folder="."):
    """Return everything on the disk that would reveal a change."""
    return {
        path: (path.lstat().st_mtime_ns, path.lstat().st_ino, path.read_bytes() if path.is_file() else None)
        for path in Path(folder).rglob("*")
    }


# ---------------------------------------------------------------------- runs in the list


def test_finished_run_lists_checkpoints_and_best(list_runs):
    fit()
    run = list_runs()["line"]
    assert (run["status"], run["host"], run["pid"], run["problem"]) == ("finished", None, None, None)
    one, *others = run["checkpoints"]
    assert [each["step"] for each in run["checkpoints"]] == [3, 6, 9]
    assert [each["epoch"] for each in run["checkpoints"]] == [1, 2, 3]
    assert [each["best"] for each in run["checkpoints"]] == [True, False, False]  # the best for "max": the loss falls
    assert one["metrics"]["val_loss"] > max(other["metrics"]["val_loss"] for other in others)
    for each in run["checkpoints"]:
        path = Path("runs/line/checkpoints", each["name"])
        assert Path(each["path"]) == path
        assert each["bytes"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert (each["monitor"], each["valid"], each["problem"]) == ("val_loss", True, None)
        assert abs(datetime.fromisoformat(each["saved"]).timestamp() - time.time()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "CRITICAL"])
def test_status_is_known_at_every_log_level(list_runs, level):
    Path("endings.py").write_text(ENDINGS)
    words = ["--trainer.log_level", level, "--trainer.name"]
    fit(*words, "finished")
    fit(*words, "short", "--trainer.max_steps=1", "--trainer.max_epochs=null")
    with pytest.raises(KeyError, match="nothing"):
        fit("--model=tests.helpers.cli_tasks.Broken", *words, "failed")
    with pytest.raises(RuntimeError, match="what is wrong"):
        fit("--model=endings.Wordy", *words, "wordy")
    with pytest.raises(SystemExit, match="143"):
        fit("--model=endings.Asked", *words, "stopped")
    assert main(["fit", "--config=line.yaml", "--model=endings.AskedTwice", *words, "at-once"]) == 130
    found = list_runs()
    assert {name: (run["status"], run["error"]) for name, run in found.items()} == {
        "finished": ("finished", None),
        "short": ("finished", None),
        "failed": ("failed", "KeyError: 'nothing' (after step 0)"),
        "wordy": ("failed", "RuntimeError: what is wrong (after step 1)"),
        "stopped": ("stopped", None),
        "at-once": ("stopped", None),
    }
    fit(*words, "failed", "--trainer.resume=auto")
    assert (list_runs()["failed"]["status"], list_runs()["failed"]["error"]) == ("finished", None)


def test_lumen_errors_and_late_errors_are_logged(list_runs, capsys):
    Path("ends.py").write_text(
        "import torch, lumen\nfrom tests.helpers.cli_tasks import Line\n\n"
        "class Infinite(Line):\n"
        "    def training_step(self, batch):\n        return super().training_step(batch) / 0\n\n"
        "class Late(lumen.Callback):\n"
        "    def teardown(self, trainer, task, stage):\n        raise OSError('too late')\n"
    )
    assert main(["fit", "--config=line.yaml", "--model=ends.Infinite", "--trainer.name=infinite"]) == 1
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    with pytest.raises(OSError, match="too late"):
        fit("--trainer.callbacks=ends.Late", "--trainer.name=late")
    found = list_runs()
    assert (found["infinite"]["status"], found["late"]["status"]) == ("failed", "failed")
    assert found["infinite"]["error"] == f"NonFiniteLoss: {line.removeprefix('error: ')} (after step 0)"
    assert found["late"]["error"] == "OSError: too late (after step 9)"
    assert "in teardown" in Path("runs/late/run.log").read_text()


def test_exception_checkpoints_are_listed_but_foreign_folders_not(list_runs, show_runs):
    folder = Path("runs/mine/checkpoints")
    for name in ("step-7", "step-10-validating", "step-10-1", "step-10", "step-9"):
        save_small(folder / "step-0").rename(folder / name)
    save_small(folder / "step-8").rename(folder / "exception-step-8-1")
    save_small(folder / "step-6").rename(folder / "step-6.damaged-1")
    shutil.copytree(folder / "step-7", folder / "step-7.tmp-0a1b2c3d")
    save_small(folder / "step-5").rename(folder / "last")
    (folder / "notes.txt").write_text("")
    run = list_runs()["mine"]
    names = [each["name"] for each in run["checkpoints"]]
    assert names == [
        "step-6.damaged-1", "step-7", "exception-step-8-1", "step-9", "step-10-validating", "step-10", "step-10-1"
    ]  # fmt: skip
    assert [each["name"] for each in run["checkpoints"] if not each["valid"]] == ["step-6.damaged-1"]
    assert run["temporary"] == ["step-7.tmp-0a1b2c3d"]
    show_runs("--verify")  # checkpoints that were set aside are known already


def test_numbers_that_json_does_not_have_are_strings(list_runs):
    save_small(Path("runs/mine/checkpoints/step-1"))
    assert list_runs()["mine"]["checkpoints"][0]["metrics"] == {"loss": "nan"}


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("file", FILES)
def test_damage_is_named_with_its_file(list_runs, file):
    for step in (1, 2):
        save_small(Path(f"runs/mine/checkpoints/step-{step}"))
    path = Path("runs/mine/checkpoints/step-1", file)
    data = path.read_bytes()

    def problems(*words, code=0):
        good, *rest = reversed(list_runs(*words, code=code)["mine"]["checkpoints"])
        assert (good["name"], good["valid"]) == ("step-2", True)
        return [each["problem"] for each in rest]

    assert problems() == problems("--verify") == [None]
    os.truncate(path, len(data) - 1)
    assert str(path) in problems()[0]
    assert str(path) in problems("--verify", code=1)[0]
    path.unlink()
    assert file in problems()[0]
    path.write_bytes(data)
    flip(path)
    assert file in problems("--verify", code=1)[0]
    assert (problems() == [None]) == (file != "manifest.json")  # the sizes alone do not reveal the damage


def test_unknown_format_affects_only_its_checkpoint(list_runs):
    for step in (1, 2):
        save_small(Path(f"runs/mine/checkpoints/step-{step}"))
    tamper_with_manifest(Path("runs/mine/checkpoints/step-2"), lambda manifest: manifest.__setitem__("format", 9))
    one, other = list_runs()["mine"]["checkpoints"]
    assert one["valid"]
    assert "has format 9" in other["problem"]


# ---------------------------------------------------------------------- nothing is changed


def test_looking_changes_nothing(show_runs):
    fit()
    folder = Path("runs/line/checkpoints")
    save_small(folder / "step-20").rename(folder / "step-20.tmp-01234567")
    flip(folder / "step-00000009/model/00000-00000.safetensors")
    flip(folder / "step-00000006/manifest.json")
    before = read_contents()
    for words in ([], ["--json"], ["runs"], ["runs/line", "--json"]):
        show_runs(*words)
    show_runs("--verify", code=1)
    assert read_contents() == before


@pytest.mark.slow
def test_run_in_progress_is_never_listed_as_damaged():
    folder = Path("runs/mine/checkpoints")
    stop = threading.Event()

    def write():
        for step in range(1, 1000):
            save_small(folder / f"step-{step}")
            if step > 3:
                remove_checkpoint(folder / f"step-{step - 3}")
            if stop.is_set():
                return

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    try:
        while not folder.exists():
            time.sleep(0.01)
        end = time.monotonic() + 100
        while len(seen) <= 10 and time.monotonic() < end:
            found = list_checkpoints(folder)
            assert [each for each in found if each.problem] == []
            seen |= {each.path.name for each in found}
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 10


# ---------------------------------------------------------------------- other files and directories


def test_foreign_and_broken_files_are_skipped_or_named(list_runs, capsys):
    fit("--trainer.max_epochs=1")
    runs = Path("runs")
    (runs / "notes.txt").write_text("")
    (runs / "lightning/checkpoints").mkdir(parents=True)
    (runs / "lightning/checkpoints/epoch=1.ckpt").write_bytes(b"\x80")
    (runs / "file").mkdir()
    (runs / "file/checkpoints").write_text("")
    (runs / ".hidden").mkdir()
    save_small(runs / ".hidden/checkpoints/step-1")
    (runs / "loop").symlink_to(runs.absolute())
    (runs / "dangling").symlink_to("nothing")
    (runs / "linked").symlink_to((runs / "line").absolute())
    save_small(runs / "sweep/a/lr=0.1/checkpoints/step-1")
    save_small(runs / "elsewhere/step-1")
    for number, text in enumerate(["", "[]", "{}", "\ud800"]):
        broken = runs / f"broken/checkpoints/step-{number}"
        broken.mkdir(parents=True)
        (broken / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    os.mkfifo(runs / "broken/checkpoints/step-9")
    (runs / "broken/checkpoints/step-8").mkdir()
    os.mkfifo(runs / "broken/checkpoints/step-8/manifest.json")
    found = list_runs()
    assert set(found) == {"line", "linked", "lr=0.1", "elsewhere", "broken"}
    assert not any(each["valid"] for each in found["broken"]["checkpoints"])
    assert len(found["broken"]["checkpoints"]) == 5
    assert found["elsewhere"]["status"] == "unknown"
    assert [each["valid"] for each in found["lr=0.1"]["checkpoints"]] == [True]


def test_runs_in_an_object_store_are_shown_too(list_runs, show_runs):
    save_small(as_path_or_url("memory://runs-of-mine/gpt/step-1"))
    save_small(as_path_or_url("memory://runs-of-mine/gpt/step-2"))
    one, other = list_runs("memory://runs-of-mine")["gpt"]["checkpoints"]
    assert (one["name"], one["valid"], other["path"]) == ("step-1", True, "memory://runs-of-mine/gpt/step-2")
    assert abs(datetime.fromisoformat(one["saved"]).timestamp() - time.time()) < 60
    memory = fsspec.filesystem("memory")
    assert one["bytes"] == sum(memory.size(file) for file in memory.find("/runs-of-mine/gpt/step-1"))
    memory.rm_file("/runs-of-mine/gpt/step-2/state.json")
    assert (
        "state.json" in list_runs("memory://runs-of-mine/gpt", "--verify", code=1)["gpt"]["checkpoints"][1]["problem"]
    )
    assert "memory://runs-of-mine/gpt" in show_runs("memory://runs-of-mine")


def test_where_there_is_nothing_that_is_said(show_runs, capsys):
    Path("runs").mkdir()
    assert show_runs() == "there are no runs in runs\n"
    assert json.loads(show_runs("--json")) == []
    save_small(Path("mine/checkpoints/step-1"))
    for words, message in (
        (["nowhere"], "there is no directory nowhere. Name the directory of the runs: lumen runs DIR."),
        (["mine/checkpoints/step-1"], "mine/checkpoints/step-1 is a checkpoint. Name the directory of its run"),
        (["--verfy"], "lumen runs has no option --verfy. Did you mean --verify?"),
        (["mine", "yours"], "unrecognized arguments: yours. Usage: lumen runs [DIR]"),
    ):
        assert main(["runs", *words]) == 2
        assert message in capsys.readouterr().err


def test_run_and_checkpoint_folder_are_equivalent(list_runs):
    save_small(Path("runs/mine/checkpoints/step-1"))
    save_small(Path("runs/yours/checkpoints/step-1"))
    assert list_runs("runs/mine") == list_runs("runs/mine/checkpoints")
    assert [run["path"] for run in list_runs("runs/mine").values()] == ["runs/mine"]
    assert set(list_runs(".")) == {"mine", "yours"}


# ---------------------------------------------------------------------- format


def test_piped_output_has_one_line_per_checkpoint(show_runs):
    fit("--trainer.name", "a-run-with-a-name-that-is-longer-than-most-terminals-are-wide-" + "x" * 60)
    save_small(Path("runs/z/checkpoints/step-1"))
    os.truncate("runs/z/checkpoints/step-1/state.json", 3)
    RunDirectory.claim(Path("runs"), "none", reuse=True).release()
    text = show_runs()
    assert "\x1b" not in text
    head, *lines = text.splitlines()
    assert head.split() == ["RUN", "STATUS", "CHECKPOINT", "EPOCH", "SAVED", "BYTES", "STATE", "METRICS"]
    assert [line.split()[:3] for line in lines[:2]] == [
        [f"runs/{Path(line.split()[0]).name}", "finished", f"step-{step:08d}"]
        for line, step in zip(lines[:2], (3, 6), strict=True)
    ]
    assert [line.split()[6] for line in lines] == ["best", "valid", "valid", "-", "damaged"]
    assert re.search(r"val_loss=\d\.\d{6,}", lines[0])
    assert lines[3].endswith("no checkpoints")
    assert "state.json has 3 bytes instead of" in lines[4]
    assert len({line.index(line.split()[1]) for line in lines}) == 1  # the columns are aligned


def test_listing_reads_only_manifests(show_runs):
    source = save(Path("source/step-1"), model={"w": torch.ones(1 << 16)})
    for step in range(200):
        shutil.copytree(source, f"runs/run-{step % 4}/checkpoints/step-{step}", copy_function=os.link)
    assert show_runs("source").count("valid") == 1  # the imported files have been read
    before = count_read_bytes()
    assert show_runs().count("valid") == 200
    assert count_read_bytes() - before < 200 * (source / "manifest.json").stat().st_size + 10_000
