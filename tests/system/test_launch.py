"""Several processes: their launcher, their end, and their output."""

import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import lumen
from lumen.cli import main
from lumen.distributed import agent
from lumen.distributed.cluster_environment import find_cluster_process
from lumen.errors import ConfigError
from lumen.strategies.factory import choose_processes, make_strategy
from tests.helpers.jobs import find_free_port
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, weights
from tests.helpers.working_directory import clear_environment, find_commands

SCRIPT = """
import atexit, os, signal, sys, time
from pathlib import Path
import lumen
from tests.helpers.tasks import Regression, loader

class Task(Regression):
    def training_step(self, batch):
        if self.trainer.global_step == 1:
            self.trouble()
        if WAIT:
            time.sleep(0.05)
            Path("training").touch()
        return super().training_step(batch)

    def trouble(self):
        rank = self.trainer.global_rank
        if MODE in ("error", "ended") and rank == 1:
            if MODE == "ended":  # as the agent ends those that have failed after another one
                atexit.register(os.kill, os.getpid(), signal.SIGTERM)
            raise KeyError("what the user did")
        if MODE == "hang" and rank == 1:
            this_is_where_it_hangs()
        if MODE == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "left" and rank == 1:
            sys.exit(5)

def threads():
    return [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]

def this_is_where_it_hangs():
    time.sleep(1000)

if __name__ == "__main__":
    MODE, steps, *rest = sys.argv[1:]
    if MODE == "threads":  # fatal if one of them wants Python after its end
        atexit.register(lambda: print(f"gloo's threads: {[name for name in threads() if 'gloo' in name]}"))
        Path(f"order-{os.environ.get('RANK')}").write_text(str({f"class {number}" for number in range(20)}))
    WAIT = MODE == "slow"
    hanging = lumen.DDP(timeout_s=4, startup_timeout_s=60)
    strategy = hanging if MODE == "hang" else os.environ.get("TEST_STRATEGY", "auto")
    trainer = lumen.Trainer(
        max_steps=int(steps), devices=int(rest[0]) if rest else None, strategy=strategy, name="run", resume="auto",
        fast_dev_run=MODE == "fast",
        accelerator=os.environ.get("TEST_ON", "cpu"), enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Task(), loader(40, 8))
    with open("after", "a") as file:
        file.write(f"{os.environ.get('RANK')} of {trainer.world_size}, step {trainer.global_step}\\n")
"""
SEEDED = """
import os, torch
from tests.helpers.cli_tasks import Line

class Seeded(Line):
    def __init__(self, width: int):
        super().__init__(width)
        open("drawn-" + os.environ["RANK"], "w").write(str(torch.rand(1)))
"""
CUT = """
from torch import nn
from tests.helpers.cli_tasks import Line

class Cut(Line):
    parallel_plan = {"layer.0": "colwise", "layer.1": "rowwise"}

    def __init__(self, width: int):
        super().__init__(width)
        self.layer = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 1))
"""
TORN = """
from tests.helpers.cli_tasks import Line

class Torn(Line):
    def on_train_start(self):
        1 / (1 - self.trainer.global_rank)
"""


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """Make a working directory, a temporary directory and a script, without variables of a launcher."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    clear_environment(monkeypatch)
    Path("train.py").write_text(SCRIPT)
    config = {
        "seed_everything": 7,
        "model": {"class_path": "tests.helpers.cli_tasks.Line", "init_args": {"lr": 0.05}},
        "data": {"class_path": "tests.helpers.cli_tasks.Points", "init_args": {"samples": 24}},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False},
    }
    Path("line.yaml").write_text(yaml.safe_dump(config))


def start(*words, **environment):
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip


def finish(process, limit_s=90):
    """Return the exit code and all output; check that no process of this test is left."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # its workers end with it
        pytest.fail(f"not done after {limit_s} s\n{process.communicate()[0]}")
    for _ in range(600):
        if not (left := list_processes()):
            return process.returncode, output
        time.sleep(0.1)
    pytest.fail(f"left behind: {left}\n{output}")


def list_processes():
    """Return the command and the pid of every other process that works in this test's directory."""
    here, found = os.getcwd(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and os.readlink(folder / "cwd") == here:
                found.append(((folder / "cmdline").read_text().replace("\0", " "), int(folder.name)))
        except OSError:
            continue
    return [(command, number) for command, number in found if command]


def run(*words, **environment):
    return finish(start(*words, **environment))


def list_left_in_tmp():
    return [path for path in Path(os.environ["TMPDIR"]).iterdir() if path.name.startswith("lumen")]


def read_steps():
    return sorted(path.name for path in Path("runs/run/checkpoints").glob("step-*"))


# ---------------------------------------------------------------------- the command line


def test_one_flag_runs_a_command_in_two_processes(tmp_path):
    """The saved config and the commands that the run prints work again."""
    code, output = run("-m", "lumen", "fit", "--config", "line.yaml", "--trainer.devices", "2")
    assert code == 0, output
    assert output.count("the run is in runs/line\n") == output.count("model.width is 3, from data.width\n") == 1
    assert output.count("finished: max_epochs=2 reached at step 6") == 1
    saved = yaml.safe_load(Path("runs/line/config.yaml").read_text())
    assert (saved["trainer"]["devices"], saved["trainer"]["strategy"], saved["seed_everything"]) == (2, "auto", 7)
    assert not list_left_in_tmp()
    printed = find_commands(output)
    assert printed.keys() == {"longer", "curves", "weights"}, output
    words = ["test", "--config", "runs/line/config.yaml", "--ckpt_path", "last", "--output"]
    code, output = run("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lumen", *words, "two.json")
    assert code == 0, output
    assert output.count("test_loss") == 1
    assert main([*words, "one.json", "--trainer.devices", "1"]) == 0
    one, two = (yaml.safe_load(Path(name).read_text())[0]["test_loss"] for name in ("one.json", "two.json"))
    assert one == pytest.approx(two, rel=1e-6)
    for command in (printed["curves"], printed["weights"]):
        assert main(shlex.split(command)[1:]) == 0, command
    code, output = run("-m", *shlex.split(printed["longer"]))
    assert (code, output.count("finished: max_epochs=4 reached")) == (0, 1), output


def test_mesh_options_start_processes_and_survive_resume():
    Path("cut.py").write_text(CUT)
    mesh = ["--trainer.devices", "2", "--trainer.strategy", "mesh", "--trainer.strategy.tensor", "2"]
    words = ["--model", "cut.Cut", *mesh, "--trainer.strategy.wrap", "Sequential"]
    code, output = run("-m", "lumen", "fit", "--config", "line.yaml", *words)
    assert code == 0, output
    assert "2 processes on CPU · Mesh" in output
    code, again = run("-m", *shlex.split(find_commands(output)["longer"]))
    assert (code, again.count("finished: max_epochs=4 reached"), again.count("Mesh")) == (0, 1, 1), again
    saved = yaml.safe_load(Path("runs/line/config.yaml").read_text())["trainer"]["strategy"]
    assert (saved["class_path"], saved["init_args"]["tensor"]) == ("lumen.Mesh", 2)


def test_drawn_seed_is_equal_in_all_processes():
    Path("line.yaml").write_text(Path("line.yaml").read_text().replace("seed_everything: 7\n", ""))
    Path("seeds.py").write_text(SEEDED)
    words = ["--model", "seeds.Seeded", "--trainer.fast_dev_run", "true", "--trainer.devices", "2"]
    code, output = run("-m", "lumen", "fit", "--config", "line.yaml", *words)
    assert code == 0, output
    assert Path("drawn-0").read_text() == Path("drawn-1").read_text()


def test_error_of_all_processes_is_printed_once():
    """The exit code is 2."""
    words = ["--trainer.devices", "2", "--trainer.global_batch_size", "8", "--trainer.accumulate_grad_batches", "2"]
    code, output = run("-m", "lumen", "fit", "--config", "line.yaml", *words)
    assert code == 2
    assert output.splitlines()[1:] == [
        "error: global_batch_size and accumulate_grad_batches both set the size of a step. Set only one of them."
    ]
    assert not list_left_in_tmp()


def test_help_and_print_config_start_nothing():
    words = ["-m", "lumen", "fit", "--config", "line.yaml", "--trainer.devices", "2"]
    code, output = run(*words, "--print_config", LUMEN_LAUNCHER="1")  # the process is alive and not a child of this one
    assert (code, yaml.safe_load(output)["trainer"]["devices"]) == (0, 2)


# ---------------------------------------------------------------------- scripts


@pytest.mark.slow
def test_a_script_runs_in_its_workers(monkeypatch):
    """No process is untrained after `fit`, and none ends with a thread of gloo.

    A set of strings has one order on all ranks, so a label map that a script makes of a set is the same everywhere.
    """
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code, output = run("train.py", "threads", "4", "2")
    assert code == 0, output
    assert sorted(Path("after").read_text().splitlines()) == ["0 of 2, step 4", "1 of 2, step 4"]
    assert output.count("finished: max_steps=4") == 1
    assert output.splitlines()[-1] == "gloo's threads: []"
    assert Path("order-0").read_text() == Path("order-1").read_text() != Path("order-None").read_text()
    assert not list_left_in_tmp()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["-c", "-m"])
def test_program_restarts_in_workers_as_it_was_started(way):
    words = {"-m": ["-m", "train"], "-c": ["-c", "import sys, runpy; runpy.run_path('train.py', run_name='__main__')"]}
    code, output = run(*words[way], "fine", "2", "2")
    assert code == 0, output
    assert len(Path("after").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [["-"], ["-i", "train.py", "fine", "2", "2"]])
def test_program_that_cannot_restart_is_refused_with_advice(words):
    code = SCRIPT.replace("sys.argv[1:]", '["fine", "2", "2"]')
    done = subprocess.run(
        [sys.executable, *words], input=code if words == ["-"] else "", text=True, capture_output=True
    )
    assert "ConfigError: 2 devices need one process each" in done.stderr
    assert "Run a script instead" in done.stderr
    assert not Path("after").exists()


def test_several_devices_are_refused_under_pytest(tmp_path):
    trainer = lumen.Trainer(max_steps=1, accelerator="cpu", devices=2, default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"pytest runs the program.*lumen fit.*torchrun --nproc-per-node 2"):
        trainer.fit(Regression(), loader())
    assert not list(tmp_path.glob("runs*"))


# ---------------------------------------------------------------------- failures of one rank


def test_command_shows_user_lines_of_failed_rank():
    Path("torn.py").write_text(TORN)
    words = ["fit", "--config", "line.yaml", "--trainer.devices", "2", "--model", "torn.Torn"]
    code, output = run("-m", "lumen", *words)
    assert code == 1, output
    at = f'  File "{Path("torn.py").absolute()}", line 6, in on_train_start\n'
    told = output[output.index("Traceback (most recent call last):\n") :].splitlines(keepends=True)
    assert told[1] == at, output
    assert [line for line in told if line.startswith("  File ")] == [at], output
    hidden, *end = told[-4:]
    assert re.fullmatch(r"  \.\.\. \d+ frames of lumen; --verbose shows all\n", hidden), output
    assert end == [
        "ZeroDivisionError: division by zero\n",
        "This was in fit, before its first step (rank 1).\n",
        "The tracebacks of all ranks are in runs/line/logs.\n",
    ]
    assert "lumen/trainer/trainer.py" in run("-m", "lumen", *words, "--verbose")[1]


@pytest.mark.parametrize(
    "time", [pytest.param(n, marks=pytest.mark.torture if n else pytest.mark.slow) for n in range(20)]
)
def test_traceback_of_failing_rank_comes_last(time, capsys):
    code, output = run("train.py", "error", "9", "2")
    lines = output.splitlines()
    assert code == 1, output
    where = "This was in step 2 (epoch 0, batch_idx 3, rank 1)."
    all_are = "The tracebacks of all ranks are in runs/run/logs."
    assert lines[-3:] == ["KeyError: 'what the user did'", where, all_are], output
    assert output.count("Traceback") == 1, output
    (folder,) = list_left_in_tmp()
    assert f"rank 1 failed; the output of the ranks above 0 is in {folder}" in lines
    assert not Path("after").exists()
    (log,) = Path("runs/run/logs").glob("*-rank1.log")
    assert log.read_text().endswith(f"KeyError: 'what the user did'\n{where}\n")
    assert "Traceback (most recent call last):" in log.read_text()
    (first,) = Path("runs/run/logs").glob("*-rank0.log")
    assert "failed: ProcessLost: rank 0 lost another process of the run" in first.read_text()
    run_log = Path("runs/run/run.log").read_text()
    assert run_log.endswith(first.read_text()[-200:])
    assert main(["runs", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["error"]) == ("failed", "KeyError: 'what the user did' (after step 1)")


@pytest.mark.slow
def test_raising_rank_ended_by_signal_exits_with_1():
    code, output = run("train.py", "ended", "9", "2")
    assert code == 1, output
    assert "KeyError: 'what the user did'" in output.splitlines()


@pytest.mark.slow
def test_hanging_rank_is_an_error_with_all_stacks():
    code, output = run("train.py", "hang", "9", "2")
    assert code == 70, output
    assert re.search(r"rank 1 is in user code: \S+train\.py:\d+ in this_is_where_it_hangs\. rank 0 waits\.\n$", output)
    one, other = re.split(r"rank 1 \(pid \d+\) is here:", output.rpartition("rank 0 (pid")[2])
    assert "in train_step" in one  # rank 0 waits for gradients here
    assert re.search(r"line \d+, in this_is_where_it_hangs", other)
    assert "set a longer timeout_s" in other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("killed", 137, "error: rank 1 was killed by SIGKILL. If nobody sent the signal, the system may have run out"),
        ("left", 5, "error: rank 1 ended with exit code 5."),
    ],
)
def test_a_rank_that_says_nothing_is_named(mode, code, said):
    found, output = run("train.py", mode, "9", "2")
    assert found == code, output
    assert output.splitlines()[-1].startswith(said)
    assert "ProcessLost" not in output


FIRST_OF_TWO = """
import os, sys, time
while not os.path.exists("go"):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    time.sleep(1)
    sys.exit(3)
sys.exit(75)
"""


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torch leaves the output of ranks open
def test_a_rank_ends_by_itself_after_another(tmp_path, monkeypatch):
    look = agent._find_running_and_failed

    def look_just_before_one_ends(pids):
        found = look(pids)
        if len(pids) == 2 and not os.path.exists("go"):
            Path("go").touch()
            os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
        return found

    monkeypatch.setattr(agent, "_find_running_and_failed", look_just_before_one_ends)
    failures = agent.run_workers(2, ["-c", FIRST_OF_TWO], tmp_path, [])
    gc.collect()  # while the warning is ignored
    assert {rank: failure.exitcode for rank, failure in failures.items()} == {0: 75, 1: 3}


@pytest.mark.time_limit(900)
@pytest.mark.parametrize(
    ("count", "rounds"), [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(5, 10, marks=pytest.mark.torture)]
)
def test_exit_codes_of_jobs_side_by_side(count, rounds):
    for _ in range(rounds):
        strategies = ("ddp", "fsdp", "ddp", "fsdp", "ddp")[:count]
        jobs = [start("train.py", "fast", "1", "2", TEST_STRATEGY=strategy) for strategy in strategies]
        outputs = [job.communicate()[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0] * count, outputs


# ---------------------------------------------------------------------- signals


def wait_until_trained(process):
    deadline = time.monotonic() + 60
    while not Path("training").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), pytest.param(signal.SIGTERM, marks=pytest.mark.torture)],
)
def test_stopped_job_saves_and_resumes(number):
    process = start("train.py", "slow", "100000", "2")
    wait_until_trained(process)
    os.killpg(process.pid, number)  # as from a terminal
    code, output = finish(process)
    assert code == 128 + number, output
    assert output.count(f"{number.name}: finishing this step") == 1
    assert 'train.py slow 100000 2   # with Trainer(..., name="run", resume="auto")' in output
    assert not Path("after").exists()
    stopped = read_steps()[-1]
    assert not list_left_in_tmp()
    number = int(stopped.removeprefix("step-")) + 2
    code, output = run("train.py", "fine", str(number), "2")
    assert code == 0, output
    assert f"resuming from runs/run/checkpoints/{stopped}" in output
    assert f"1 of 2, step {number}" in Path("after").read_text()


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "slow", "100000")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("train.py", "slow", "100000", "2"), TORCHRUN], ids=["own launcher", "torchrun"])
def test_signal_to_all_processes_counts_once(words):
    process = start(*words)
    wait_until_trained(process)
    for _, number in list_processes():  # like systemd for a service
        os.kill(number, signal.SIGTERM)
    code, output = finish(process)
    assert code == (143 if words is not TORCHRUN else 1), output
    assert output.count("SIGTERM: finishing this step") == 1
    (stopped,) = set(
        re.findall(r"stopped at step (\d+) by SIGTERM; newest checkpoint: step-0*\1\. Resume with", output)
    )
    assert read_steps()[-1] == f"step-{int(stopped):08d}"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("train.py", "slow", "100000", "2"), TORCHRUN], ids=["own launcher", "torchrun"])
def test_workers_do_not_outlive_their_launcher(words):
    process = start(*words)
    wait_until_trained(process)
    process.kill()
    finish(process)
    assert read_steps()


@pytest.mark.slow
def test_workers_of_killed_launcher_do_not_train():
    importing = 'from pathlib import Path; import os, time; rank = os.environ.get("RANK"); Path(f"at-{rank}").touch()\n'
    Path("train.py").write_text(importing + "time.sleep(2 * (rank is not None))\n" + SCRIPT)
    process = start("train.py", "slow", "100000", "2")
    while not (Path("at-0").exists() and Path("at-1").exists()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    _, output = finish(process)
    assert f"the launcher of this job (process {process.pid}) has ended" in output
    assert not Path("training").exists()


# ---------------------------------------------------------------------- processes started by other launchers


def test_torch_distributed_launch_is_supported():
    port = str(find_free_port())
    launcher = ["-m", "torch.distributed.launch", "--nproc-per-node", "2", "--master-port", port]
    code, output = run(*launcher, "-m", "lumen", "fit", "--config", "line.yaml")
    assert code == 0, output
    assert output.count("finished: max_epochs=2 reached at step 6") == 1
    assert "option" not in output
    assert json.loads(Path("runs/line/environment.json").read_text())["processes"] == 2


@pytest.mark.parametrize("spelt", ["--local-rank", "--local_rank"])
def test_local_rank_argument_must_match_environment(monkeypatch, capsys, spelt):
    words = [f"{spelt}=0", "fit", "--config=line.yaml", "--print_config"]
    assert main(words) == 2
    assert "local" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(words) == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(words) == 2


TOGETHER = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from tests.helpers.tasks import Regression, bare_trainer, loader, weights

def train():
    task = Regression(dtype=torch.float64)
    bare_trainer(Path(), max_epochs=1).fit(task, loader(40, 8, dtype=torch.float64))
    torch.save(weights(task), f"weights-{dist.get_rank()}")

def work(rank, port):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train()
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[1:]:
        torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
    else:
        train()
"""


def assert_two_processes_trained_as_one():
    task = Regression(dtype=torch.float64)
    bare_trainer(Path(), max_epochs=1, accumulate_grad_batches=2).fit(task, loader(40, 8, dtype=torch.float64))
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(f"weights-{rank}"), weights(task), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_two_agents_train_one_run_on_two_nodes():
    Path("together.py").write_text(TOGETHER)
    port = find_free_port()
    agent = [
        "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost", "together.py",
    ]  # fmt: skip
    nodes = [start(*agent) for _ in range(2)]
    outputs = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert_two_processes_trained_as_one()


@pytest.mark.slow
def test_processes_of_multiprocessing_spawn_train_together():
    Path("together.py").write_text(TOGETHER)
    code, output = run("together.py", str(find_free_port()))
    assert code == 0, output
    assert_two_processes_trained_as_one()


RESTARTED = """
import os, signal, sys, time
import lumen
from tests.helpers.tasks import Regression, loader

ATTEMPT, RANK, KILLS = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), int(sys.argv[1])

class Task(Regression):
    def training_step(self, batch):
        if self.trainer.global_step == 2 + ATTEMPT and ATTEMPT < KILLS and RANK == ATTEMPT % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)

if ATTEMPT and RANK == 1:
    time.sleep(float(sys.argv[2]))  # the other one is there long before
for steps in (1, 6):
    trainer = lumen.Trainer(
        max_steps=steps, accelerator="cpu", name="run", seed=5,
        callbacks=[lumen.ModelCheckpoint(every_n_train_steps=1)],
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Task(), loader(40, 8))
"""


def run_with_restarts(kills, late_s, *options):
    """Return the records of both runs of a program that torchrun restarts `kills` times."""
    Path("restarted.py").write_text(RESTARTED)
    code, output = run(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(kills), *options,
        "restarted.py", str(kills), str(late_s),
    )  # fmt: skip
    assert code == 0, output
    assert sorted(path.name for path in Path("runs").iterdir()) == ["run", "run-2"], output
    assert output.count("resuming from runs/run-2/checkpoints/") == kills
    records = [Path("runs", name, "metrics.csv").read_bytes() for name in ("run", "run-2")]
    shutil.rmtree("runs")
    return records


SHARED_STORE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


@pytest.mark.slow
@pytest.mark.time_limit(900)
@pytest.mark.parametrize(
    ("times", "kills", "late_s"),
    [(1, 2, 4), pytest.param(20, 1, 0, marks=pytest.mark.torture)],
    ids=["a late rank", "20 times of 20"],
)
def test_torchrun_restarts_resume_in_the_same_directories(times, kills, late_s):
    undisturbed = run_with_restarts(0, 0)
    for _ in range(times):
        assert run_with_restarts(kills, late_s, *SHARED_STORE) == undisturbed


def test_slurm_tasks_are_used_as_ranks():
    common = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0",
    }  # fmt: skip
    ranks = [
        start("train.py", "fine", "4", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **common) for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert Path("after").read_text().splitlines() == ["None of 2, step 4"] * 2
    assert "".join(outputs).count("finished: max_steps=4") == 1


SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "SLURM_NNODES": "3", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NODELIST": "gpu[03-05,9],big1",
}  # fmt: skip


def test_slurm_says_who_a_process_is():
    found = find_cluster_process(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (4, 5, 0, 1)
    assert (found.started_by, found.node, found.nodes) == ("SLURM", 2, 3)
    assert re.fullmatch(r"tcp://gpu03:(1[5-9]|2\d)\d{3}", found.address)
    assert find_cluster_process({**SLURM, "SLURM_JOB_ID": "78"}).address != found.address
    assert find_cluster_process({**SLURM, "MASTER_ADDR": "there", "MASTER_PORT": "99"}).address == "tcp://there:99"
    assert find_cluster_process({**SLURM, "SLURM_NODELIST": "login1,gpu[1-2]"}).address.startswith("tcp://login1:")


@pytest.mark.parametrize(
    "change", [{"SLURM_STEP_ID": ""}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["batch script", "interactive step", "one task"],
)  # fmt: skip
def test_one_process_of_slurm_is_alone(change):
    assert find_cluster_process({**SLURM, **change}).world_size == 1


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, {"devices": 4}, "devices: 4 requested, but torchrun started 2 processes of this run on this node"),
        ({}, {"devices": 1}, "devices: 1 requested, but torchrun started 2"),
        ({}, {"num_nodes": 2}, "num_nodes: 2 requested, but torchrun started 1 nodes"),
        ({}, {"strategy": "single"}, "SingleDevice runs one process, but torchrun started 2 processes. Use"),
        ({"RANK": "2"}, {}, "process 2 of 2"),
        ({"RANK": "first"}, {}, "RANK: expected a number, found 'first'"),
        (None, {"num_nodes": 2, "devices": 4}, "torchrun --nnodes 2 --nproc-per-node 4"),
        (None, {"devices": 0}, "devices: expected a number of devices or auto, found 0"),
        (None, {"strategy": "single", "devices": 2}, "runs one process, but devices requests 2"),
        (None, {"strategy": "dp"}, "one process for several devices.*Use ddp"),
    ],
)
def test_requested_and_launched_processes_must_agree(monkeypatch, environment, options, message):
    found = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {} if environment is None else {**found, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        lumen.Trainer(max_steps=1, accelerator="cpu", **options)


def test_a_strategy_follows_from_the_processes(monkeypatch):
    assert isinstance(make_strategy("auto", "cpu"), lumen.SingleDevice)
    assert choose_processes("auto", None, "cpu").world_size == choose_processes(-1, None, "cpu").world_size == 1
    asked = make_strategy("auto", "cpu", 2)
    assert isinstance(asked, lumen.DDP)
    assert asked.processes.must_be_started
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    mine = lumen.DDP(bucket_cap_mb=1)
    assert make_strategy(mine, "cpu", 2) is mine
    assert (mine.processes.rank, mine.processes.world_size, mine.processes.must_be_started) == (1, 2, False)
    assert mine.device == torch.device("cpu")


def test_ddp_with_one_process_starts_no_other(tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=2, accelerator="cpu", strategy="ddp", enable_checkpointing=False)
    trainer.fit(Regression(), loader())
    assert (trainer.global_step, trainer.world_size) == (2, 1)
    trainer.strategy.processes.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.cuda(devices=2)
def test_two_gpus_train_over_nccl():
    code, output = run("train.py", "fine", "4", "2", TEST_ON="cuda")
    assert code == 0, output
    assert sorted(Path("after").read_text().splitlines()) == ["0 of 2, step 4", "1 of 2, step 4"]


@pytest.mark.cuda
def test_one_gpu_opens_nccl_and_closes_it():
    code, output = run("train.py", "fine", "4", TEST_ON="cuda", TEST_STRATEGY="ddp")
    assert code == 0, output


AS_LONG_AS_ITS_LAUNCHER = """
import os, pathlib, time
parent = os.getppid()
pathlib.Path({!r}).touch()
while os.getppid() == parent:
    time.sleep(0.05)
"""


def test_folders_of_killed_launchers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def launched(code):
        words = [sys.executable, "-m", "lumen.distributed.launch", "1", "0", "-c", code]
        return subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)

    def folders():
        return set(tmp_path.glob("lumen-launch-*"))

    assert launched("import os; os._exit(3)").wait(90) == 3
    assert folders() == set()  # the messages of rank 0 are on the terminal
    (kept := tmp_path / "lumen-launch-kept").mkdir()  # as left by a failed job
    running = [launched(AS_LONG_AS_ITS_LAUNCHER.format(str(tmp_path / name))) for name in "ab"]
    try:
        until = time.monotonic() + 120
        while not all((tmp_path / name).exists() for name in "ab"):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert len(folders()) == 3
        os.killpg(running[0].pid, signal.SIGKILL)
        running[0].wait()
        assert launched("").wait(90) == 0
        assert len(folders()) == 2
        assert kept in folders()
    finally:
        for job in running:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
