"""`lumen runs`: what there is, how it stands and what is wrong with it, without touching any of it."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import fsspec
import pytest
import torch

from lumen.checkpoint.folder import find_checkpoints, remove_checkpoint
from lumen.checkpoint.listing import list_checkpoints
from lumen.checkpoint.places import as_place
from lumen.cli import main
from lumen.trainer.run_directory import RunDirectory
from tests.helpers import ROOT
from tests.helpers.checkpoints import FILES, bytes_read, save, small, tamper

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LUMEN = [sys.executable, "-m", "lumen"]
CONFIG = {
    "seed_everything": 7,
    "model": {"class_path": "tests.helpers.cli_tasks.Line", "init_args": {"lr": 0.05}},
    "data": {"class_path": "tests.helpers.cli_tasks.Points", "init_args": {"samples": 12}},
    "trainer": {
        "max_epochs": 3,
        "log_every_n_steps": 1,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss", "mode": "max"}}],
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


pytestmark = pytest.mark.usefixtures("workplace")


@pytest.fixture
def shown(capsys):
    """What the command prints."""

    def run(*words, code=0):
        capsys.readouterr()
        assert main(["runs", *map(str, words)]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def listed(shown):
    """The same by the name of each run, from its JSON."""

    def run(*words, code=0):
        runs = json.loads(shown("--json", *words, code=code))
        found = {Path(each["path"]).name: each for each in runs}
        assert len(found) == len(runs)
        return found

    return run


def fit(*words):
    assert main(["fit", "--config", "line.yaml", *words]) == 0


def contents(folder="."):
    """Everything on the disk that a change would show in."""
    return {
        path: (path.lstat().st_mtime_ns, path.lstat().st_ino, path.read_bytes() if path.is_file() else None)
        for path in Path(folder).rglob("*")
    }


# ---------------------------------------------------------------------- what is there


def test_a_finished_run_is_shown_with_its_checkpoints_and_the_best_one(listed):
    fit()
    run = listed()["line"]
    assert (run["status"], run["host"], run["pid"], run["problem"]) == ("finished", None, None, None)
    one, *others = run["checkpoints"]
    assert [each["step"] for each in run["checkpoints"]] == [3, 6, 9]
    assert [each["epoch"] for each in run["checkpoints"]] == [1, 2, 3]
    assert [each["best"] for each in run["checkpoints"]] == [True, False, False]  # of "max": the loss falls
    assert one["metrics"]["val_loss"] > max(other["metrics"]["val_loss"] for other in others)
    for each in run["checkpoints"]:
        path = Path("runs/line/checkpoints", each["name"])
        assert Path(each["path"]) == path
        assert each["bytes"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert (each["monitor"], each["valid"], each["problem"]) == ("val_loss", True, None)
        assert abs(datetime.fromisoformat(each["saved"]).timestamp() - time.time()) < 60


def test_how_a_run_stands_is_told_by_its_lock_and_by_what_it_said_last(listed):
    def start():
        return subprocess.Popen(
            [*LUMEN, "fit", "--config=line.yaml", "--trainer.max_epochs=10000000"],
            env=ENVIRONMENT, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_for(name):
        while not list(Path(f"runs/{name}/checkpoints").glob("step-*/manifest.json")):
            time.sleep(0.05)

    first = start()
    wait_for("line")
    second = start()
    wait_for("line-2")
    try:
        both = listed()
        assert {name: run["status"] for name, run in both.items()} == {"line": "running", "line-2": "running"}
        assert (both["line"]["pid"], both["line-2"]["pid"]) == (first.pid, second.pid)
        assert both["line"]["host"] == os.uname().nodename
        assert all(each["valid"] for run in both.values() for each in run["checkpoints"])
    finally:
        first.send_signal(signal.SIGTERM)
        second.kill()
        assert (first.wait(), second.wait()) == (143, -9)
    ended = listed()
    assert {name: run["status"] for name, run in ended.items()} == {"line": "stopped", "line-2": "failed"}
    assert ended["line"]["pid"] is None
    with pytest.raises(KeyError, match="nothing"):
        fit("--model", "tests.helpers.cli_tasks.Broken")
    fit("--trainer.log_level", "WARNING", "--trainer.name", "quiet")
    fit("--trainer.log_level", "WARNING", "--trainer.name", "short", "--trainer.max_steps", "1")
    statuses = {name: run["status"] for name, run in listed().items()}
    assert statuses["quiet"] == "finished"  # by its newest checkpoint
    Path("runs/line-2/run.log").unlink()
    assert listed()["line-2"]["status"] == "unknown"


ENDINGS = """
import os, signal
from tests.helpers.cli_tasks import Line

class Asked(Line):
    def training_step(self, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch)

class AskedTwice(Line):
    def training_step(self, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch)

class Killed(Line):
    def training_step(self, batch):
        if self.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)

class Wordy(Line):
    def training_step(self, batch):
        if self.global_step == 1:
            raise RuntimeError("what is wrong\\nand what it comes from")
        return super().training_step(batch)
"""


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "CRITICAL"])
def test_how_a_run_has_ended_is_known_at_every_log_level(listed, level):
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
    found = listed()
    assert {name: (run["status"], run["error"]) for name, run in found.items()} == {
        "finished": ("finished", None),
        "short": ("finished", None),
        "failed": ("failed", "KeyError: 'nothing' (step 0)"),
        "wordy": ("failed", "RuntimeError: what is wrong (step 1)"),
        "stopped": ("stopped", None),
        "at-once": ("stopped", None),
    }
    fit(*words, "failed", "--trainer.resume=auto")
    assert (listed()["failed"]["status"], listed()["failed"]["error"]) == ("finished", None)


def test_a_killed_run_has_failed_at_every_log_level(listed):
    Path("endings.py").write_text(ENDINGS)
    with pytest.raises(KeyError):
        fit("--model=tests.helpers.cli_tasks.Broken", "--trainer.name=killed")
    words = ["fit", "--config=line.yaml", "--model=endings.Killed", "--trainer.log_level=CRITICAL"]
    ended = subprocess.run([*LUMEN, *words, "--trainer.name=killed", "--trainer.resume=auto"], env=ENVIRONMENT)
    assert ended.returncode == -9
    run = listed()["killed"]
    assert (run["status"], run["error"]) == ("failed", None)  # of that before it nothing is said any more


def test_the_log_of_a_failed_run_has_the_whole_traceback_and_the_list_of_runs_its_last_line(shown, capsys):
    with pytest.raises(KeyError, match="nothing"):
        fit("--model=tests.helpers.cli_tasks.Broken", "--trainer.log_level=ERROR")
    assert "Traceback" not in capsys.readouterr().err  # whoever gets the error shows it
    log = Path("runs/line/run.log").read_text()
    assert log.count("Traceback (most recent call last):") == 1
    assert log.count(" ERROR failed: KeyError: 'nothing' (step 0)\n") == 1
    assert f'File "{ROOT / "tests/helpers/cli_tasks.py"}", line ' in log
    assert '    return {}["nothing"]\n' in log
    assert log.endswith("KeyError: 'nothing'\n")
    assert shown().splitlines()[-1].split(maxsplit=7)[1:] == ["failed", *"-----", "KeyError: 'nothing' (step 0)"]
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal(80))
    assert "runs/line  failed" in text
    assert "  KeyError: 'nothing' (step 0)" in text


def test_an_error_of_lumen_and_one_at_the_very_end_are_in_the_log_too(listed, capsys):
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
    found = listed()
    assert (found["infinite"]["status"], found["late"]["status"]) == ("failed", "failed")
    assert found["infinite"]["error"] == f"NonFiniteLoss: {line.removeprefix('error: ')} (step 0)"
    assert found["late"]["error"] == "OSError: too late (step 9)"
    assert "in teardown" in Path("runs/late/run.log").read_text()


def newer(name):
    return any(path.name > name for path in find_checkpoints(Path("runs/line/checkpoints")))


def test_going_on_with_a_run_changes_how_it_stands(listed):
    fit("--trainer.max_epochs=1")
    assert listed()["line"]["status"] == "finished"
    words = [*LUMEN, "fit", "--config=line.yaml", "--trainer.max_epochs=10000000", "--trainer.resume=auto"]
    with subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        try:
            while not newer("step-00000009"):
                time.sleep(0.02)
            assert listed()["line"]["status"] == "running"
        finally:
            process.kill()
    assert listed()["line"]["status"] == "failed"
    fit("--trainer.max_steps=4", "--trainer.max_epochs=null", "--trainer.resume=auto")  # nothing to do
    assert listed()["line"]["status"] == "finished"


def test_checkpoints_of_failures_are_shown_and_what_is_none_is_not(listed, shown):
    folder = Path("runs/mine/checkpoints")
    for name in ("step-7", "step-10-validating", "step-10-1", "step-10", "step-9"):
        small(folder / "step-0").rename(folder / name)
    small(folder / "step-8").rename(folder / "exception-step-8-1")
    small(folder / "step-6").rename(folder / "step-6.damaged-1")
    shutil.copytree(folder / "step-7", folder / "step-7.tmp-0a1b2c3d")
    small(folder / "step-5").rename(folder / "last")
    (folder / "notes.txt").write_text("")
    run = listed()["mine"]
    names = [each["name"] for each in run["checkpoints"]]
    assert names == [
        "step-6.damaged-1", "step-7", "exception-step-8-1", "step-9", "step-10-validating", "step-10", "step-10-1"
    ]  # fmt: skip
    assert [each["name"] for each in run["checkpoints"] if not each["valid"]] == ["step-6.damaged-1"]
    assert run["temporary"] == ["step-7.tmp-0a1b2c3d"]
    shown("--verify")  # what was set aside is known already


def test_numbers_that_json_does_not_have_are_strings(listed):
    small(Path("runs/mine/checkpoints/step-1"))
    assert listed()["mine"]["checkpoints"][0]["metrics"] == {"loss": "nan"}


# ---------------------------------------------------------------------- damage


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
def test_damage_is_named_with_its_file(listed, file):
    for step in (1, 2):
        small(Path(f"runs/mine/checkpoints/step-{step}"))
    path = Path("runs/mine/checkpoints/step-1", file)
    data = path.read_bytes()

    def problems(*words, code=0):
        good, *rest = reversed(listed(*words, code=code)["mine"]["checkpoints"])
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
    assert (problems() == [None]) == (file != "manifest.json")  # sizes alone do not tell


def test_another_format_is_a_problem_of_that_checkpoint_alone(listed):
    for step in (1, 2):
        small(Path(f"runs/mine/checkpoints/step-{step}"))
    tamper(Path("runs/mine/checkpoints/step-2"), lambda manifest: manifest.__setitem__("format", 9))
    one, other = listed()["mine"]["checkpoints"]
    assert one["valid"]
    assert "has format 9" in other["problem"]


# ---------------------------------------------------------------------- nothing is changed


def test_looking_changes_nothing(shown):
    fit()
    folder = Path("runs/line/checkpoints")
    small(folder / "step-20").rename(folder / "step-20.tmp-01234567")
    flip(folder / "step-00000009/model/00000-00000.safetensors")
    flip(folder / "step-00000006/manifest.json")
    before = contents()
    for words in ([], ["--json"], ["runs"], ["runs/line", "--json"]):
        shown(*words)
    shown("--verify", code=1)
    assert contents() == before


def test_looking_disturbs_neither_who_holds_a_run_nor_who_takes_it(shown):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom lumen.trainer.run_directory import RunDirectory\n"
        "for _ in range(300):\n    RunDirectory.claim(Path('runs'), 'mine', reuse=True).release()\n"
    )
    RunDirectory.claim(Path("runs"), "mine", reuse=True).release()
    looks = 0
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT) as process:
        while process.poll() is None:
            shown()
            looks += 1
    assert process.returncode == 0
    assert looks > 20


def test_a_run_that_saves_and_removes_meanwhile_is_never_called_damaged():
    folder = Path("runs/mine/checkpoints")
    stop = threading.Event()

    def write():
        for step in range(1, 1000):
            small(folder / f"step-{step}")
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
        end = time.monotonic() + 4
        while time.monotonic() < end:
            found = list_checkpoints(folder)
            assert [each for each in found if each.problem] == []
            seen |= {each.path.name for each in found}
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 10


# ---------------------------------------------------------------------- whatever else lies there


def test_foreign_and_broken_things_are_passed_over_or_named(listed, capsys):
    fit("--trainer.max_epochs=1")
    runs = Path("runs")
    (runs / "notes.txt").write_text("")
    (runs / "lightning/checkpoints").mkdir(parents=True)
    (runs / "lightning/checkpoints/epoch=1.ckpt").write_bytes(b"\x80")
    (runs / "file").mkdir()
    (runs / "file/checkpoints").write_text("")
    (runs / ".hidden").mkdir()
    small(runs / ".hidden/checkpoints/step-1")
    (runs / "loop").symlink_to(runs.absolute())
    (runs / "dangling").symlink_to("nothing")
    (runs / "linked").symlink_to((runs / "line").absolute())
    small(runs / "sweep/a/lr=0.1/checkpoints/step-1")
    small(runs / "elsewhere/step-1")
    for number, text in enumerate(["", "[]", "{}", "\ud800"]):
        broken = runs / f"broken/checkpoints/step-{number}"
        broken.mkdir(parents=True)
        (broken / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    os.mkfifo(runs / "broken/checkpoints/step-9")
    (runs / "broken/checkpoints/step-8").mkdir()
    os.mkfifo(runs / "broken/checkpoints/step-8/manifest.json")
    found = listed()
    assert set(found) == {"line", "linked", "lr=0.1", "elsewhere", "broken"}
    assert not any(each["valid"] for each in found["broken"]["checkpoints"])
    assert len(found["broken"]["checkpoints"]) == 5
    assert found["elsewhere"]["status"] == "unknown"
    assert [each["valid"] for each in found["lr=0.1"]["checkpoints"]] == [True]


def test_names_and_values_of_strangers_do_no_harm(listed, shown):
    small(Path("runs/\x1b[2J\nevil\udcff/checkpoints/step-1"))
    info = {"metrics": {"a\nb": 1, "c": "text", "d": [1]}, "epoch": {"$tuple": []}, "best": 3, "finished": "x"}
    tamper(Path("runs/\x1b[2J\nevil\udcff/checkpoints/step-1"), lambda manifest: manifest.__setitem__("info", info))
    assert "\x1b[2J" not in shown()
    assert len(shown().splitlines()) == 2
    (run,) = listed().values()
    assert run["checkpoints"][0]["metrics"] == {"a\nb": 1}
    assert "\x1b[2J" not in terminal(80)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
def test_what_this_user_may_not_read_is_named_and_the_rest_is_shown(tmp_path):
    for name in ("mine", "closed", "unreadable", "locked", "blocked"):
        small(Path(f"runs/{name}/checkpoints/step-1"))
    RunDirectory.claim(Path("runs"), "locked", reuse=True).release()
    manifest = "unreadable/checkpoints/step-1/manifest.json"
    for place in ("closed", manifest, "locked/.lock", "blocked/checkpoints/step-1"):
        os.chmod(Path("runs", place), 0)
    code = (
        "import os, sys\nfrom lumen.cli import main\nimport lumen.cli.runs\n"
        "os.setgid(65534); os.setuid(65534)\nsys.exit(main(['runs', '--json']))"
    )
    above = [tmp_path, *tmp_path.parents]
    modes = {path: path.stat().st_mode for path in above}
    try:
        for path in above:
            path.chmod(modes[path] | 0o055)
        done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    finally:
        for path in above:
            path.chmod(modes[path])
    assert done.returncode == 0, done.stderr
    assert "warning: cannot look into runs/closed: Permission denied" in done.stderr
    found = {Path(run["path"]).name: run for run in json.loads(done.stdout)}
    assert set(found) == {"mine", "unreadable", "locked", "blocked"}
    for name in ("unreadable", "blocked"):
        assert "Permission denied" in found[name]["checkpoints"][0]["problem"]
    assert found["locked"]["status"] == "unknown"


def test_runs_in_an_object_store_are_shown_too(listed, shown):
    small(as_place("memory://runs-of-mine/gpt/step-1"))
    small(as_place("memory://runs-of-mine/gpt/step-2"))
    one, other = listed("memory://runs-of-mine")["gpt"]["checkpoints"]
    assert (one["name"], one["valid"], other["path"]) == ("step-1", True, "memory://runs-of-mine/gpt/step-2")
    assert abs(datetime.fromisoformat(one["saved"]).timestamp() - time.time()) < 60
    memory = fsspec.filesystem("memory")
    assert one["bytes"] == sum(memory.size(file) for file in memory.find("/runs-of-mine/gpt/step-1"))
    memory.rm_file("/runs-of-mine/gpt/step-2/state.json")
    assert "state.json" in listed("memory://runs-of-mine/gpt", "--verify", code=1)["gpt"]["checkpoints"][1]["problem"]
    assert "memory://runs-of-mine/gpt" in shown("memory://runs-of-mine")


def test_where_there_is_nothing_that_is_said(shown, capsys):
    Path("runs").mkdir()
    assert shown() == "there are no runs in runs\n"
    assert json.loads(shown("--json")) == []
    small(Path("mine/checkpoints/step-1"))
    for words, message in (
        (["nowhere"], "there is no directory nowhere. Say where the runs are: lumen runs DIR."),
        (["mine/checkpoints/step-1"], "mine/checkpoints/step-1 is a checkpoint. Give its run"),
        (["--verfy"], "lumen runs has no option --verfy. Did you mean --verify?"),
        (["mine", "yours"], "unrecognized arguments: yours. Usage: lumen runs [DIR]"),
    ):
        assert main(["runs", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_run_and_its_folder_of_checkpoints_stand_for_the_run(listed):
    small(Path("runs/mine/checkpoints/step-1"))
    small(Path("runs/yours/checkpoints/step-1"))
    assert listed("runs/mine") == listed("runs/mine/checkpoints")
    assert [run["path"] for run in listed("runs/mine").values()] == ["runs/mine"]
    assert set(listed(".")) == {"mine", "yours"}


# ---------------------------------------------------------------------- how it looks


def test_a_pipe_gets_one_whole_line_for_each_checkpoint(shown):
    fit("--trainer.name", "a-run-with-a-name-that-is-longer-than-most-terminals-are-wide-" + "x" * 60)
    small(Path("runs/z/checkpoints/step-1"))
    os.truncate("runs/z/checkpoints/step-1/state.json", 3)
    RunDirectory.claim(Path("runs"), "none", reuse=True).release()
    text = shown()
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
    assert len({line.index(line.split()[1]) for line in lines}) == 1  # columns stand below each other


def terminal(columns, *words):
    """What a terminal of some width shows."""
    import fcntl
    import struct
    import termios

    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = ENVIRONMENT | {"TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen([*LUMEN, "runs", *words], env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:
            break
        text += piece
    os.close(mine)
    assert process.wait() == 0
    return text.decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_table_of_its_width(columns):
    fit("--trainer.max_epochs=2")
    flip(Path("runs/line/checkpoints/step-00000006/manifest.json"))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal(columns)).splitlines()
    assert lines[0] == "runs/line  finished"
    assert lines[1].split() == ["checkpoint", "epoch", "saved", "size", "metrics"]
    assert re.match(r"★  step-00000003 +1  \d{4}-\d\d-\d\d \d\d:\d\d  [\d.]+ KB  val_loss \d\.\d{3} *$", lines[2])
    assert re.match(r"✗  step-00000006 +damaged *$", lines[3])
    assert "manifest.json was changed or cut off" in "".join(lines[4:])
    assert max(map(len, lines[:4])) <= columns


def test_of_two_hundred_checkpoints_only_the_manifests_are_read(shown):
    source = save(Path("source/step-1"), model={"w": torch.ones(1 << 16)})
    for step in range(200):
        shutil.copytree(source, f"runs/run-{step % 4}/checkpoints/step-{step}", copy_function=os.link)
    assert shown("source").count("valid") == 1  # what is imported for it has been read
    before = bytes_read()
    assert shown().count("valid") == 200
    assert bytes_read() - before < 200 * (source / "manifest.json").stat().st_size + 10_000
