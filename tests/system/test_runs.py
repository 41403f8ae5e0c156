"""`lumen runs` with runs that are alive, killed or failed, in a separate terminal."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lumen.checkpoint.format.folder import find_checkpoints
from lumen.trainer.run_directory import RunDirectory
from tests.helpers import ROOT, runs
from tests.helpers.checkpoints import save_small, tamper_with_manifest
from tests.helpers.runs import ENDINGS, fit, flip

CONFIG = runs.CONFIG
pytestmark = pytest.mark.usefixtures("config_directory")


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LUMEN = [sys.executable, "-m", "lumen"]


def test_status_comes_from_lock_and_last_log_line(list_runs):
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
        both = list_runs()
        assert {name: run["status"] for name, run in both.items()} == {"line": "running", "line-2": "running"}
        assert (both["line"]["pid"], both["line-2"]["pid"]) == (first.pid, second.pid)
        assert both["line"]["host"] == os.uname().nodename
        assert all(each["valid"] for run in both.values() for each in run["checkpoints"])
    finally:
        first.send_signal(signal.SIGTERM)
        second.kill()
        assert (first.wait(), second.wait()) == (143, -9)
    ended = list_runs()
    assert {name: run["status"] for name, run in ended.items()} == {"line": "stopped", "line-2": "failed"}
    assert ended["line"]["pid"] is None
    Path("runs/line-2/run.log").unlink()
    assert list_runs()["line-2"]["status"] == "unknown"


def test_killed_runs_are_failed_at_every_log_level(list_runs):
    Path("endings.py").write_text(ENDINGS)
    with pytest.raises(KeyError):
        fit("--model=tests.helpers.cli_tasks.Broken", "--trainer.name=killed")
    words = ["fit", "--config=line.yaml", "--model=endings.Killed", "--trainer.log_level=CRITICAL"]
    ended = subprocess.run([*LUMEN, *words, "--trainer.name=killed", "--trainer.resume=auto"], env=ENVIRONMENT)
    assert ended.returncode == -9
    run = list_runs()["killed"]
    assert (run["status"], run["error"]) == ("failed", None)  # the attempt before is no longer reported


def test_failed_run_logs_traceback_and_list_shows_error(show_runs, capsys):
    with pytest.raises(KeyError, match="nothing"):
        fit("--model=tests.helpers.cli_tasks.Broken", "--trainer.log_level=ERROR")
    assert "Traceback" not in capsys.readouterr().err  # the program that gets the error shows it
    log = Path("runs/line/run.log").read_text()
    assert log.count("Traceback (most recent call last):") == 1
    assert log.count(" ERROR failed: KeyError: 'nothing' (after step 0)\n") == 1
    assert f'File "{ROOT / "tests/helpers/cli_tasks.py"}", line ' in log
    assert '    return {}["nothing"]\n' in log
    assert log.endswith("KeyError: 'nothing'\nThis was in step 1 (epoch 0, batch_idx 0).\n")
    assert show_runs().splitlines()[-1].split(maxsplit=7)[1:] == [
        "failed",
        *"-----",
        "KeyError: 'nothing' (after step 0)",
    ]
    text = re.sub(r"\x1b\[[0-9;]*m", "", show_in_terminal(80))
    assert "runs/line  failed" in text
    assert "  KeyError: 'nothing' (after step 0)" in text


def write_newer(name):
    return any(path.name > name for path in find_checkpoints(Path("runs/line/checkpoints")))


def test_resuming_changes_the_status(list_runs):
    fit("--trainer.max_epochs=1")
    assert list_runs()["line"]["status"] == "finished"
    words = [*LUMEN, "fit", "--config=line.yaml", "--trainer.max_epochs=10000000", "--trainer.resume=auto"]
    with subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        try:
            while not write_newer("step-00000009"):
                time.sleep(0.02)
            assert list_runs()["line"]["status"] == "running"
        finally:
            process.kill()
    assert list_runs()["line"]["status"] == "failed"
    fit("--trainer.max_steps=4", "--trainer.max_epochs=null", "--trainer.resume=auto")  # no steps to train
    assert list_runs()["line"]["status"] == "finished"


def test_listing_disturbs_neither_holders_nor_claims(show_runs):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom lumen.trainer.run_directory import RunDirectory\n"
        "for _ in range(300):\n    RunDirectory.claim(Path('runs'), 'mine', reuse=True).release()\n"
    )
    RunDirectory.claim(Path("runs"), "mine", reuse=True).release()
    looks = 0
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT) as process:
        while process.poll() is None:
            show_runs()
            looks += 1
    assert process.returncode == 0
    assert looks > 20


def test_names_and_values_of_strangers_do_no_harm(list_runs, show_runs):
    save_small(Path("runs/\x1b[2J\nevil\udcff/checkpoints/step-1"))
    info = {"metrics": {"a\nb": 1, "c": "text", "d": [1]}, "epoch": {"$tuple": []}, "best": 3, "finished": "x"}
    tamper_with_manifest(
        Path("runs/\x1b[2J\nevil\udcff/checkpoints/step-1"), lambda manifest: manifest.__setitem__("info", info)
    )
    assert "\x1b[2J" not in show_runs()
    assert len(show_runs().splitlines()) == 2
    (run,) = list_runs().values()
    assert run["checkpoints"][0]["metrics"] == {"a\nb": 1}
    assert "\x1b[2J" not in show_in_terminal(80)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
def test_unreadable_runs_are_named_and_others_shown(tmp_path):
    for name in ("mine", "closed", "unreadable", "locked", "blocked"):
        save_small(Path(f"runs/{name}/checkpoints/step-1"))
    RunDirectory.claim(Path("runs"), "locked", reuse=True).release()
    manifest = "unreadable/checkpoints/step-1/manifest.json"
    for place in ("closed", manifest, "locked/.lock", "blocked/checkpoints/step-1"):
        os.chmod(Path("runs", place), 0)
    code = (
        "import os, sys\nfrom lumen.cli import main\nimport lumen.tools.runs.command\n"
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
    assert "warning: cannot read runs/closed: Permission denied" in done.stderr
    found = {Path(run["path"]).name: run for run in json.loads(done.stdout)}
    assert set(found) == {"mine", "unreadable", "locked", "blocked"}
    for name in ("unreadable", "blocked"):
        assert "Permission denied" in found[name]["checkpoints"][0]["problem"]
    assert found["locked"]["status"] == "unknown"


def show_in_terminal(columns, *words):
    """Return the text of a terminal of given width."""
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


@pytest.mark.parametrize("columns", [80, 140])
def test_rows_of_a_sweep_fit_into_a_terminal(columns):
    fit("--trainer.max_epochs=1")
    config = Path("runs/line/config.yaml").read_text()
    names = [f"setting_number_{number}" for number in range(20)]
    shutil.copytree("runs/line", "runs/other")
    for run in ("line", "other"):
        Path(f"runs/{run}/config.yaml").write_text(config + "".join(f"{name}: {run}\n" for name in names))
    text = re.sub(r"\x1b\[[0-9;]*m", "", show_in_terminal(columns, "--sort=val_loss", "--where=setting_number_9 != x"))
    head, *rows = (line.split() for line in text.splitlines()[:3])
    assert max(map(len, text.splitlines()[:3])) <= columns
    assert [row[0] for row in rows] == ["line", "other"]
    assert [len(row) for row in rows] == [len(head)] * 2
    assert {"setting_number_9", "val_loss"} < {*head}
    left_out = text.partition("need a wider terminal or a pipe: ")[2].replace(",", "").split()
    assert sorted([*left_out, *(name for name in head if name in names)]) == sorted(names)
    piped = subprocess.run([*LUMEN, "runs", "--table"], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert {*map(str.upper, names)} < {*piped.stdout.splitlines()[0].split()}


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_table_of_its_width(columns):
    fit("--trainer.max_epochs=2")
    flip(Path("runs/line/checkpoints/step-00000006/manifest.json"))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", show_in_terminal(columns)).splitlines()
    assert lines[0] == "runs/line  finished"
    assert lines[1].split() == ["checkpoint", "epoch", "saved", "size", "metrics"]
    assert re.match(r"★  step-00000003 +1  \d{4}-\d\d-\d\d \d\d:\d\d  [\d.]+ KB  val_loss \d\.\d{3} *$", lines[2])
    assert re.match(r"✗  step-00000006 +damaged *$", lines[3])
    assert "manifest.json was changed or cut off" in "".join(lines[4:])
    assert max(map(len, lines[:4])) <= columns
