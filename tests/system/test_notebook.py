"""Notebooks: cells in a real kernel, their output, their interruption, and their leftovers."""

import asyncio
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import nbformat
import psutil
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

from tests.helpers import ROOT

CELL_LIMIT_S = 60


class Notebook(NotebookClient):
    """Notebook whose cells are written while its kernel runs."""

    def process_message(self, msg, cell, cell_index):
        """Keep every drawn picture, and press the stop button once for each text that requests it."""
        content = msg["content"]
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.pictures.append(content["data"]["text/html"])
        if msg["msg_type"] == "stream" and self.stop_at and self.stop_at[0] in content["text"]:
            del self.stop_at[0]
            self.pressed = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)

    def run(self, code, *, stop_at=(), fails=False):
        """Execute one more cell.

        Args:
            code: Source of the cell.
            stop_at: Texts in the output; at each one in turn, the kernel is interrupted.
            fails: True if the cell ends in an error.

        Returns:
            Outputs of the cell as a front end shows them; text written to one stream without a pause is one output.
        """
        self.pictures, self.stop_at = [], list(stop_at)
        cell = nbformat.v4.new_code_cell(dedent(code))
        self.nb.cells.append(cell)
        try:
            self.execute_cell(cell, len(self.nb.cells) - 1)
        except CellTimeoutError:
            os.killpg(self.km.provisioner.pid, signal.SIGKILL)  # otherwise every later cell would wait for this one
            raise
        outputs = []
        for output in cell.outputs:
            if outputs and output.output_type == "stream" and output.get("name") == outputs[-1].get("name"):
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        errors = [without_colors("\n".join(each.traceback)) for each in outputs if each.output_type == "error"]
        assert bool(errors) == fails, "\n".join(errors)
        return outputs


@contextmanager
def start_kernel(folder):
    """Start a kernel of this interpreter in a folder, without the user's Jupyter files."""
    with tempfile.TemporaryDirectory() as home:  # pytest's folders are too long for a socket's name
        command = ["-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False"]
        spec = {"argv": [sys.executable, *command], "language": "python", "display_name": "here"}
        (Path(home) / "here").mkdir()
        (Path(home) / "here/kernel.json").write_text(json.dumps(spec))
        manager = AsyncKernelManager(
            kernel_name="here",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[home], ensure_native_kernel=False),
            transport="ipc",
            connection_file=f"{home}/connection.json",
        )
        environment = {**os.environ, "IPYTHONDIR": home, "PYTHONPATH": str(ROOT)}
        notebook = Notebook(
            nbformat.v4.new_notebook(), km=manager, timeout=CELL_LIMIT_S, allow_errors=True, shutdown_kernel="immediate"
        )
        with notebook.setup_kernel(cleanup_kc=True, cwd=str(folder), env=environment):
            process = psutil.Process(manager.provisioner.pid)
            yield notebook
        assert not process.is_running()


def without_colors(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def join_text(outputs):
    """Return the printed text, without pictures and errors."""
    return "".join(output.text for output in outputs if output.output_type == "stream")


DEFINITIONS = """
    import gc, logging, signal, sys, threading, time, warnings, weakref
    from pathlib import Path

    import psutil
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import lumen

    class Noisy(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return torch.randn(6) + index / 40, torch.tensor([index / 40])

    class Regression(lumen.TaskModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
            self.at = {}
            self.batches = []

        def training_step(self, batch):
            self.batches.append(weakref.ref(batch[0]))
            self.at.get(self.global_step, lambda: None)()
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch):
            self.log("<val>", nn.functional.mse_loss(self.net(batch[0]), batch[1]), prog_bar=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)
"""
TOOLS = """
    warnings.simplefilter("error")
    warnings.simplefilter("default", PendingDeprecationWarning)  # of the kernel's own code
    warnings.filterwarnings("ignore", "This DataLoader will create 2 worker processes")  # where there is but one core

    def fit(task, batch_size=8, **options):
        trainer = lumen.Trainer(**{"max_epochs": 3, "seed": 1, "log_every_n_steps": 1} | options)
        train = DataLoader(Noisy(), batch_size, shuffle=True, num_workers=2)
        trainer.fit(task, train, val_dataloaders=DataLoader(Noisy(), 20, num_workers=1, persistent_workers=True))
        return task

    def state():
        loggers = [logging.getLogger(name) for name in ("lumen", None)]
        return {
            "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "log": [(logger.level, *logger.handlers) for logger in loggers],
            "torch": (
                torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads(),
                torch.get_default_dtype(), torch.multiprocessing.get_sharing_strategy(),
                torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
            ),
            "streams": (sys.stdout, sys.stderr, sys.excepthook, warnings.showwarning, list(warnings.filters)),
            "threads": set(threading.enumerate()),
            "children": psutil.Process().children(recursive=True),
            "open files": [file.path for file in psutil.Process().open_files() if "/runs/" in file.path],
        }

    def changes():
        deadline = time.monotonic() + 50  # threads that feed queues end a moment after their workers
        while (now := state()) != UNTOUCHED and time.monotonic() < deadline:
            time.sleep(0.05)
        return {name: (UNTOUCHED[name], value) for name, value in now.items() if value != UNTOUCHED[name]}

    def same_training(first, second, *runs):
        (metrics, others) = (Path("runs", run, "metrics.csv").read_bytes() for run in runs)
        return metrics == others and all(map(torch.equal, first.parameters(), second.parameters()))

    # what stays is not a run's: imports, and the handler by which torch sees its workers die
    import torch._dynamo
    lumen.Trainer()
    list(DataLoader(Noisy(), 8, num_workers=1))
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # ends a moment after its worker
            thread.join()
    UNTOUCHED = state()
"""
FINISHED = "finished: max_epochs=3 reached at step 15, epoch 3\n"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Start one kernel for all tests; it has trained `undisturbed`, the run called regression."""
    with start_kernel(tmp_path_factory.mktemp("notebook")) as notebook:
        notebook.run(DEFINITIONS)
        notebook.run(TOOLS)
        notebook.first = notebook.run("undisturbed = fit(Regression())")
        yield notebook


def test_fit_shows_lines_and_one_updated_display(notebook):
    before, picture, after = notebook.first
    assert [output.output_type for output in notebook.first] == ["stream", "display_data", "stream"]
    assert {before.name, after.name} == {"stdout"}
    assert re.sub(r", \d+ threads?", "", before.text) == (
        "the run is in runs/regression\nCPU · fp32 · global batch 8 · seed 1\n"
        "name  type        parameters  trainable\nnet   Sequential          65      100 %\n"
        "Regression: 65 parameters (65 trainable, 0 frozen), < 0.01 MB float32\n"
    )
    assert after.text == (
        f"{FINISHED}newest checkpoint: runs/regression/checkpoints/step-00000015\n"
        'longer: Trainer(..., name="regression", resume="auto", max_epochs=6).fit(...)\n'
        "curves: !lumen report runs/regression\n"
        "weights: !lumen export runs/regression/checkpoints/step-00000015 --output regression.safetensors\n"
    )
    line = picture.data["text/plain"]
    assert re.match(r"step 15/15 · epoch 3/3 · loss [\d.]+ · <val> [\d.]+ · .* MB · took 0:00:\d\d$", line), line
    assert "\x1b" not in str(notebook.first)


def test_display_updates_at_most_twice_per_second(notebook):
    began_at_s = time.monotonic()
    notebook.run("""
        slow = Regression()
        slow.at = dict.fromkeys(range(20), lambda: time.sleep(0.1))
        fit(slow, batch_size=2, max_epochs=1, name="slow")
    """)
    took_s = time.monotonic() - began_at_s
    *during, last = notebook.pictures
    bar = r'step (\d+)/20 · epoch [01]/1 <progress max="1" value="([\d.]+)"></progress> (\d+) % · 0:00:\d\d left\nloss'
    seen = [(int(step), float(value), int(percent)) for step, value, percent in re.findall(bar, "".join(during))]
    assert 3 <= len(seen) <= len(during) <= 2 * took_s + 8  # also at the ends of training and evaluations
    assert all(value == step / 20 and percent == 5 * step for step, value, percent in seen)
    assert any("validation 0/2 <progress" in picture for picture in during)
    assert "&lt;val&gt;&nbsp;0." in last
    assert "<progress" not in last


def test_fit_leaves_no_workers_handlers_or_settings(notebook):
    notebook.run("assert not (left := changes()), left")


def test_no_batch_outlives_the_fit(notebook):
    notebook.run("""
        gc.collect()
        assert len(undisturbed.batches) == 15
        assert not [batch for batch in undisturbed.batches if batch() is not None]
    """)


def test_repeated_cell_trains_equally_in_new_directory(notebook):
    notebook.run(DEFINITIONS)
    written = join_text(notebook.run("again = fit(Regression())"))
    assert written.startswith("the run is in runs/regression-2\n")
    assert FINISHED in written
    notebook.run("assert same_training(undisturbed, again, 'regression', 'regression-2')")


def test_an_evaluation_shows_one_picture(notebook):
    outputs = notebook.run("values = lumen.Trainer().validate(undisturbed, DataLoader(Noisy(), 20))")
    (picture,) = outputs
    assert re.fullmatch(r"validation 2/2 · <val> [\d.]+ · took 0:00:\d\d", picture.data["text/plain"])


def test_an_error_is_one_traceback_and_leaves_nothing(notebook):
    outputs = notebook.run(
        """
        def fail():
            raise RuntimeError("a mistake of the user")

        failing = Regression()
        failing.at[7] = fail
        fit(failing, name="failed")
        """,
        fails=True,
    )
    assert [output.output_type for output in outputs] == ["stream", "display_data", "error"]
    trace = without_colors("\n".join(outputs[-1].traceback))
    assert trace.count("Traceback") == 1
    assert re.search(
        r"RuntimeError: a mistake of the user\nThis was in .*\.\nThe log of the run is runs/failed/run.log.\n"
        r"The newest checkpoint is runs/failed/checkpoints/step-00000005. Resume with:\n"
        r'  Trainer\(..., name="failed", resume="auto"\).fit\(...\)$',
        trace,
    )
    assert "another exception" not in trace
    assert len(re.findall(r"^(?:File|Cell) ", trace, re.MULTILINE)) <= 12
    notebook.run("""
        log = Path("runs/failed/run.log").read_text()
        assert log.count("Traceback (most recent call last):") == 1, log
        assert "RuntimeError: a mistake of the user\\nThis was in " in log, log
        assert "in fail\\n" in log, log
    """)
    notebook.run("assert not (left := changes()), left")


def test_interrupted_fit_saves_and_resumes_exactly(notebook):
    outputs = notebook.run(
        """
        def wait():
            sys.stdout.write("press stop\\n")  # print writes the end of the line by itself
            while not stopped.trainer.run.ending.vote.requested_signal:
                time.sleep(0.01)
            print("the step goes on")

        stopped = Regression()
        stopped.at[6] = wait
        fit(stopped, name="stopped")
        """,
        fails=True,
        stop_at=["press stop"],
    )
    assert outputs[-1].ename == "KeyboardInterrupt"
    assert join_text(outputs).endswith(
        "press stop\n"
        "SIGINT: finishing this step; a second signal stops at once\n"
        "the step goes on\n"
        "stopped at step 7 by SIGINT; newest checkpoint: step-00000007. Resume with:\n"
        '  Trainer(..., name="stopped", resume="auto").fit(...)\n'
    )
    (picture,) = [output for output in outputs if output.output_type == "display_data"]
    assert picture.data["text/plain"].startswith("step 7/15 · epoch 2/3 · ")
    notebook.run("assert not (left := changes()), left")

    written = join_text(notebook.run('resumed = fit(Regression(), name="stopped", resume="auto")'))
    assert "resuming from runs/stopped/checkpoints/step-00000007\n" in written
    assert FINISHED in written
    notebook.run("""
        assert len(resumed.batches) == 8
        assert same_training(undisturbed, resumed, "regression", "stopped")
    """)


def test_second_interrupt_exits_fit_and_keeps_kernel(notebook):
    outputs = notebook.run(
        """
        def hang():
            sys.stdout.write("press stop\\n")  # print writes the end of the line by itself
            time.sleep(1000)

        hanging = Regression()
        hanging.at[6] = hang
        fit(hanging, name="hanging")
        """,
        fails=True,
        stop_at=["press stop", "a second signal stops at once"],
    )
    assert outputs[-1].ename == "KeyboardInterrupt"
    assert join_text(outputs).count("a second signal stops at once") == join_text(outputs).count("stopped at once") == 1
    assert "another exception" not in "".join(outputs[-1].traceback)
    notebook.run("assert not (left := changes()), left")


def test_fit_in_a_thread_is_equal(notebook):
    outputs = notebook.run("""
        aside = Regression()
        thread = threading.Thread(target=fit, args=(aside,), kwargs={"name": "aside"})
        thread.start()
        thread.join()
        assert same_training(undisturbed, aside, "regression", "aside")
        assert not (left := changes()), left
    """)
    assert [output.output_type for output in outputs] == ["stream", "display_data", "stream"]
    assert FINISHED in join_text(outputs)


def test_command_started_by_cell_prints_no_escapes(notebook):
    """Kernels set FORCE_COLOR for their commands, although the output is not a terminal."""
    script = (
        dedent(DEFINITIONS) + "lumen.Trainer(max_epochs=1, name='command').fit(Regression(), DataLoader(Noisy(), 8))"
    )
    notebook.run(f"written = Path('train.py').write_text({script!r})")
    (written,) = notebook.run(f"%%bash\n{shlex.quote(sys.executable)} train.py")
    assert re.search(r"^step 5/5 · epoch 1/1 · .* took 0:00:\d\d\nfinished: ", written.text, re.MULTILINE)
    assert "\x1b" not in written.text


def test_example_notebook_runs_and_has_no_stored_outputs(tmp_path):
    example = nbformat.read(ROOT / "docs/tutorials/notebook.ipynb", as_version=4)
    nbformat.validate(example)
    cells = [cell for cell in example.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    with start_kernel(tmp_path) as notebook:
        shown = [notebook.run(cell.source) for cell in cells]
    first, longer = (join_text(outputs).splitlines() for outputs in shown[1:3])
    assert "finished: max_epochs=6 reached at step 120, epoch 6" in first
    assert "finished: max_epochs=10 reached at step 200, epoch 10" in longer
    (accuracy,) = re.findall(r"^\[{'accuracy': ([\d.]+)}\]$", shown[3][-1].data["text/plain"])
    assert float(accuracy) > 0.9
