"""Progress bar in a real terminal, with a pipe and with a debugger."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.progress_bar import strip_escapes
from tests.helpers.terminal import HIDE, SHOW


def run_in_a_terminal(script: str) -> tuple[str, str, int]:
    """Run Python with a terminal as stderr and a pipe as stdout. Return the text of both, and the exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    os.close(theirs)
    screen = b""
    try:
        while select.select([ours], [], [], 60)[0] and (part := os.read(ours, 65536)):
            screen += part
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    return out.decode(), screen.decode(), process.returncode


def test_terminal_cursor_is_restored_and_piped_output_kept(tmp_path: Path) -> None:
    out, screen, code = run_in_a_terminal(f"""
        from tests.fit.callbacks import test_progress_bar as t
        task = t.Task(pause_s=0.01)
        task.at = {{5: lambda: print("a result"), 15: t.fail}}
        t.make_trainer(t.Path({str(tmp_path)!r}), max_steps=30).fit(task, t.make_loader(30))
    """)
    assert code == 1
    assert out == "a result\n"
    assert "step 0/30 · epoch 0 ━" in strip_escapes(screen)
    assert screen.count(HIDE) == 1
    assert "RuntimeError: a mistake of the user" in screen.rpartition(SHOW)[2]


def test_failing_callback_teardown_still_restores_the_cursor(tmp_path: Path) -> None:
    _, screen, code = run_in_a_terminal(f"""
        from tests.fit.callbacks import test_progress_bar as t
        class Bad(t.Callback):
            def on_exception(self, *arguments): raise ValueError("first")
            def teardown(self, *arguments): raise ValueError("second")
        run = t.make_trainer(t.Path({str(tmp_path)!r}), max_steps=30)
        run.callbacks.insert(0, Bad())
        run.fit(t.Task(pause_s=0.01, at={{5: t.fail}}), t.make_loader(30))
    """)
    assert code == 1
    assert "ValueError: second" in screen
    assert screen.rfind(SHOW) > screen.rfind(HIDE) >= 0


def render_screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after this text."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|[^\x1b]", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[K":
            lines[row] = lines[row][:column]
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif not part.startswith(("\x1b", "\a", "\b")):
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in "\n".join(lines).rstrip().split("\n")]


def test_terminal_keeps_start_validations_and_end(tmp_path: Path) -> None:
    _, screen, code = run_in_a_terminal(f"""
        from tests.fit.callbacks import test_progress_bar as t
        saves = t.lumen.ModelCheckpoint(monitor="val_number")
        run = t.make_trainer(t.Path({str(tmp_path)!r}), max_epochs=3, name="run", enable_checkpointing=True)
        run.callbacks.insert(0, saves)
        run.fit(t.Task(pause_s=0.01), t.make_loader(5), val_dataloaders=t.make_loader(2))
    """)
    assert code == 0, screen
    shown = [line.replace(f"{tmp_path}/", "") for line in render_screen(screen)]
    assert [re.sub(r", \d+ threads?", "", line) for line in shown[:2]] == [
        "the run is in run",
        "CPU · fp32 · global batch 4 · seed 1",
    ]
    assert shown[2:4] == [
        "step 5/15 · epoch 1/3 · number 5.000 · val_number 1005 (best so far)",
        "step 10/15 · epoch 2/3 · number 10.00 · val_number 1010",
    ]
    assert re.fullmatch(r"step 15/15 · epoch 3/3 · took 0:\d\d:\d\d", shown[4])
    assert shown[5] == "number 15.00 · val_number 1015"
    assert shown[-4:] == [
        "finished: max_epochs=3 reached at step 15, epoch 3",
        "best: val_number 1005 in run/checkpoints/step-00000005",
        'longer: Trainer(..., name="run", resume="auto", max_epochs=6).fit(...)',
        "weights: lumen export run/checkpoints/step-00000005 --output run.safetensors",
    ]


@pytest.mark.slow
def test_hang_is_reported_once_below_the_bar(tmp_path: Path) -> None:
    _, screen, code = run_in_a_terminal(f"""
        from tests.fit.callbacks import test_progress_bar as t
        def hang():
            while True: t.time.sleep(0.01)
        strategy = t.lumen.SingleDevice(timeout_s=3, startup_timeout_s=6)
        run = t.make_trainer(t.Path({str(tmp_path)!r}), max_steps=30, strategy=strategy)
        run.fit(t.Task(pause_s=0.01, at={{5: hang}}), t.make_loader(30))
    """)
    assert code == 70, screen
    shown = render_screen(screen)
    (last,) = [number for number, line in enumerate(shown) if "failed in step 5 after" in line]
    assert shown[last].startswith("step 4/30 · epoch 1")
    assert re.fullmatch(r"rank 0 \(pid \d+\) is here:", shown[last + 2])
    assert [line for line in shown if "in hang" in line and "File" in line] == ['  File "<string>", line 4, in hang']
    assert "thread" not in "\n".join(shown[last + 2 : -4]).lower()
    assert "".join(shown).count("error: no step and no batch was done for") == 1
    assert screen.rfind(SHOW) > screen.rfind(HIDE)


def debug_in_a_terminal(
    script: str | list[str], commands: list[str], *, thinks_s: float = 0.0, cwd: Path = ROOT
) -> tuple[list[list[str]], str, int]:
    """Run Python in a terminal, and give a debugger a command at each of its prompts.

    Args:
        script: The program, or arguments of Python.
        commands: Input of the user.
        thinks_s: Seconds before each command.
        cwd: Working directory.

    Returns:
        Text at each prompt, the whole output, and the exit code.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *(["-c", textwrap.dedent(script)] if isinstance(script, str) else script)],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        cwd=cwd,
    )  # fmt: skip
    os.close(theirs)
    written, shown = "", []
    try:
        while select.select([ours], [], [], 60)[0] and (part := os.read(ours, 65536)):
            written += part.decode()
            if commands and strip_escapes(written).endswith("(Pdb) "):
                if select.select([ours], [], [], thinks_s)[0]:  # text is written over the prompt
                    continue
                shown.append(render_screen(written))
                os.write(ours, (commands.pop(0) + "\n").encode())
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    return shown, written, process.wait(60)


def test_debugger_gets_terminal_without_the_bar(tmp_path: Path) -> None:
    shown, written, code = debug_in_a_terminal(
        f"""
        from tests.fit.callbacks import test_progress_bar as t
        t.lumen.callbacks.display._MAX_DRAWING_SHARE = t.math.inf
        def set_trace(): import pdb; pdb.set_trace()
        task = t.Task(pause_s=0.01)
        task.at = {{5: lambda: breakpoint(), 9: set_trace}}
        bar = t.ProgressBar(refresh_per_second=1e9)
        t.make_trainer(t.Path({str(tmp_path)!r}), bar, max_steps=12).fit(task, t.make_loader(12))
        import pdb, sys
        print("as it was:", pdb.Pdb.interaction.__module__, type(sys.stdout).__name__)
        """,
        ["p 6 * 7", "up", "p step", "c", "n", "n", "n", "c"],
    )
    assert code == 0, written
    assert len(shown) == 8
    for screen in shown:
        assert screen[-1] == "(Pdb)"
        assert not any("━" in line or line.startswith("step ") for line in screen)
    assert [line for line in shown[1] if line.isdigit()] == ["42"]
    assert shown[3][-2] == "5"
    end = render_screen(written)
    assert sum(line.startswith("step 12/12") for line in end) == 1
    assert "as it was: pdb TextIOWrapper" in end
    assert written.rfind(SHOW) > written.rfind(HIDE)
    assert "step 5/12" in strip_escapes(written)  # the bar was back between the two


DEBUGGED = """
from tests.helpers.cli_tasks import Line

class Debugged(Line):
    def training_step(self, batch):
        if self.global_step == 2:
            breakpoint()
        return super().training_step(batch)
"""
CONFIG = """
model: debugged.Debugged
data: tests.helpers.cli_tasks.Points
trainer: {max_steps: 4, accelerator: cpu, enable_model_summary: false, log_level: WARNING}
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_debugger_pause_writes_nothing_and_ends_no_run(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "debugged.py").write_text(DEBUGGED)
    (tmp_path / "line.yaml").write_text(CONFIG)
    kind = "lumen.SingleDevice" if ranks == 1 else "lumen.DDP"
    patience_s = 1 if ranks == 1 else 30  # the other ranks have no other arguments
    limits = [f"--trainer.strategy.{name}" for name in (f"timeout_s={patience_s}", "startup_timeout_s=30")]
    words = ["fit", "--config", "line.yaml", f"--trainer.devices={ranks}", f"--trainer.strategy={kind}", *limits]
    shown, written, code = debug_in_a_terminal(["-m", "lumen", *words], ["p 6 * 7", "c"], thinks_s=2.5, cwd=tmp_path)
    assert code == 0, written
    first, second = shown
    said = [line for line in first if line.startswith("warning: ")]
    others = "the other ranks wait at most timeout_s of the strategy (30 s)"
    assert said == ([] if ranks == 1 else [f"warning: rank 0 is in a debugger: {others}"]), first
    assert second[-2:] == ["42", "(Pdb)"]
    assert second[: len(first) - 1] == first[:-1]
    end = render_screen(written)
    assert sum(line.startswith("step 4/4") and "took" in line for line in end) == 1
    if ranks == 1:
        ((number, unit),) = re.findall(r"([\d,.]+) (steps/s|s/step) · ", end[-1])
        step_s = float(number.replace(",", "")) ** (-1 if unit == "steps/s" else 1)
        assert step_s < 5 / 4  # The 5 s at prompts do not count.
    if ranks == 2:
        (log,) = (tmp_path / "runs" / "line" / "logs").glob("*-rank1.log")
        assert (
            log.read_text().count("rank 1 continues at its breakpoint without a prompt: only rank 0 has the terminal")
            == 1
        )
