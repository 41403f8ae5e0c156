"""`lumen verify`: it proves the promises on a user's task and data, and names the cause of a failure."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

from lumen.cli import main
from lumen.tools.proof import worker
from lumen.tools.proof.causes import explain_failure
from lumen.tools.proof.variants import Variant
from tests.helpers import ROOT
from tests.helpers.verified_tasks import SIZE, Exits, LateOnRankZero, Make

HERE, PLANNED = "tests.helpers.verified_tasks", "tests.helpers.planned"


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def verify(*words, task="Clean", data="Data", helpers=HERE, **options):
    """Return exit code, output and errors of the command, for one task of the helpers."""
    config = {
        "seed_everything": 1, "model": {"class_path": f"{helpers}.{task}", "init_args": options},
        "data": {"class_path": f"{helpers}.{data}"}, "trainer": {"max_epochs": 3},
    }  # fmt: skip
    with open("mine.yaml", "w") as file:
        yaml.safe_dump(config, file)
    command = [sys.executable, "-m", "lumen", "verify", "--config", "mine.yaml", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "140"})
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


def parse_rows(ran):
    return {row["what"]: row for row in json.loads(ran.stdout)["rows"]}


@pytest.mark.slow
@pytest.mark.time_limit(900)
def test_clean_task_is_proven_and_certificate_detects_changes():
    ran = verify(dropout=0.3)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert " proven" in ran.stdout
    assert "failed" not in ran.stdout
    assert sorted(os.listdir()) == ["certificate.json", "mine.yaml"]
    with open("certificate.json") as file:
        certificate = json.load(file)
    assert {row["promise"] for row in certificate["rows"]} == {"P1", "P2", "P3", "P4"}
    assert [row["what"] for row in certificate["rows"] if row["verdict"] != "proven"] == [
        "micro-batches joined in pairs"
    ]
    assert all(row["largest"] == 0 for row in certificate["rows"] if row["demands"] == "bits")

    again = verify("--against", "certificate.json", "--only", "validation", dropout=0.3)
    assert "numbers of the run" not in again.stdout
    changed = verify("--against", "certificate.json", "--only", "validation", dropout=0.3, lr=2e-2)
    assert changed.returncode == 1
    assert "the numbers of the run base have changed, first in step 1: the parameter of net.0.weight" in changed.stdout


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_other_versions_or_devices_are_no_change():
    only = ["--only", "validation"]
    assert verify(*only).returncode == 0
    with open("certificate.json") as file:
        certificate = json.load(file)
    with open("older.json", "w") as file:
        json.dump({**certificate, "torch": "1.0", "device": "an abacus", "threads": 0}, file)
    ran = verify("--against", "older.json", *only)
    assert ran.returncode == 0
    told = ran.stdout[ran.stdout.index("since older.json, made ") :].splitlines()[1:]
    assert told == [
        f"  torch was 1.0 and is {torch.__version__}.",
        f"  device was an abacus and is {certificate['device']}.",
        f"  threads was 0 and is {certificate['threads']}.",
        "  verdicts are the same, and numbers are bitwise identical.",
    ]


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_demo_certificate_is_reproducible():
    words = ["--config", "models/gpt.yaml", "--against", "docs/gpt-certificate.json", "--json"]
    command = [sys.executable, "-m", "lumen", "verify", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    committed, made = json.loads((ROOT / "docs/gpt-certificate.json").read_text()), json.loads(ran.stdout)
    then, now = ({(row["promise"], row["what"]): row["verdict"] for row in each["rows"]} for each in (committed, made))
    assert now == then
    assert {*now.values()} == {"proven"}
    conditions = ("torch", "python", "machine", "device", "threads", "accelerator")
    if all(made[name] == committed[name] for name in conditions):  # other processors sum in another order
        differ = [name for name in committed["runs"] if made["runs"][name] != committed["runs"][name]]
        again = "where that is meant: lumen verify --config models/gpt.yaml --certificate docs/gpt-certificate.json"
        assert (differ, ran.returncode) == ([], 0), f"{ran.stderr}; {again}"


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_data_following_training_is_reported_without_workers():
    (row,) = parse_rows(verify("--only", "workers", "--json", "--data", "null", task="Plays")).values()
    assert (row["verdict"], row["cause"]["kind"]) == ("not shown", "nothing to compare")
    assert "its dataset follows the training" in row["cause"]["text"]


def test_finished_process_leaves_others_their_time(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_PATIENCE_S", 0.2)
    runs = worker.VariantPool(Make(LateOnRankZero), SIZE, tmp_path, 2, worker.list_libraries())
    try:
        result = runs.run_variant(Variant("two", 2, "ddp"), "fp64")
    finally:
        runs.close()
    assert (result.failure, len(result.outcomes)) == (None, 2)


def test_ended_process_is_reported_with_output(tmp_path):
    runs = worker.VariantPool(Make(Exits), SIZE, tmp_path, 2, worker.list_libraries())
    try:
        result = runs.run_variant(Variant("one", 1, "single"), "fp64")
    finally:
        runs.close()
    cause = explain_failure(result)
    assert cause.kind == "process ended"
    *_, words, message = cause.text.split("\n  ")
    assert words == "the last words"
    assert message == "rank 0 ended with exit code 3 before the end of its run."


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([-9, -6], "rank 1 was killed by SIGABRT before the end of its run."),
        ([-9, -9], "rank 0 was killed by SIGKILL before the end of its run."),
        ([0, -9], "rank 0 ended with exit code 0 before the end of its run."),
    ],
)
def test_first_ended_rank_is_named(tmp_path, codes, message):
    """The pool itself kills a rank that waits for an ended one."""
    assert worker._make_silent_failure(codes, [None, None], tmp_path)["message"] == message


MANY = """
from pathlib import Path
from lumen.tools.proof.worker import VariantPool
from lumen.tools.proof.variants import Variant
from tests.helpers.verified_tasks import SIZE, Exits, LateOnRankZero, Make

names = [f"a_module_with_a_name_that_is_not_short_{number}" for number in range(5000)]
runs = VariantPool(Make(LateOnRankZero), SIZE, Path("runs"), 2, ["mine_is_broken", *names])
result = runs.run_variant(Variant("one", 1, "single"), "fp64")
runs.close()
print(result.failure, len(result.outcomes))
"""


def test_many_or_failing_modules_can_be_imported(tmp_path):
    """The modules are more than a command line holds; one that cannot be imported is skipped."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine_is_broken.py").write_text("raise KeyError('mine')")
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["None", "1"], done.stderr


@pytest.mark.time_limit(300)
def test_state_lost_by_kills_names_its_module():
    ran = verify("--only", "kills", "--json", task="Within", module="Counts")
    assert ran.returncode == 1
    found = parse_rows(ran)
    assert {*found} == {"killed in training", "killed in validation", "killed in a save"}
    for row in found.values():
        assert (row["verdict"], row["cause"]["kind"]) == ("failed", "state is kept in a module")
        assert "net.2 (Counts)" in row["cause"]["place"]


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    ("module", "kind", "text"),
    [
        ("Unordered", "an operation is not deterministic", "a set, whose order"),
        ("Hashes", "a value depends on the interpreter", "The code uses hash(), "),
    ],
)
def test_order_and_hash_differ_between_interpreters(module, kind, text):
    (row,) = parse_rows(verify("--only", "again", "--json", task="Within", module=module)).values()
    assert (row["verdict"], row["cause"]["kind"]) == ("failed", kind)
    assert text in row["cause"]["text"]


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("only", ["accumulate", pytest.param("processes,kills,checkpoints", marks=pytest.mark.slow)])
def test_unrepeatable_training_has_one_cause(only):
    """The comparisons differ for other reasons too, which all follow from the first."""
    rows = parse_rows(verify("--only", only, "--json", data="Noisy"))
    assert {(row["verdict"], row["cause"]["kind"]) for row in rows.values()} == {("failed", "unseeded randomness")}
    (text,) = {row["cause"]["text"] for row in rows.values()}
    assert "The code uses SystemRandom.random(), " in text


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_planned_task_is_proven_on_a_mesh():
    words = ["--only", "processes,evaluation,checkpoints", "--json"]
    ran = verify(*words, task="Planned", data="Tokens", helpers=PLANNED)
    assert ran.returncode == 0, ran.stdout
    meshes = [row["promise"] for row in json.loads(ran.stdout)["rows"] if "Mesh" in row["what"]]
    assert meshes == ["P1", "P3", "P4"]
    assert json.loads(ran.stdout)["notes"] == []


@pytest.mark.time_limit(300)
def test_wrong_plan_has_one_cause():
    ran = verify("--only", "processes", task="Planned", data="Tokens", helpers=PLANNED, heads=4)
    assert (ran.returncode, ran.stdout.count("failed:")) == (1, 1), ran.stdout
    assert ran.stdout.count("seen in: same training: two processes, Mesh\n") == 1
    assert "parallel_plan: blocks.0.mix computes other values" in ran.stdout
    assert "the number of heads" in " ".join(ran.stdout.split())


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_replaced_parameters_are_reported_before_comparing():
    (row,) = parse_rows(verify("--json", task="Replaced")).values()
    assert (row["what"], row["verdict"]) == ("the task trains", "failed")
    assert "the optimizer holds 2 parameters that are not the task's" in row["cause"]["text"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "2"], "--steps: must be at least 4"),
        (["--only", "everything"], "--only: expected some of"),
        (["--against", "nothing.json"], "--against nothing.json: cannot be read"),
        (["--trainer.max_stepz", "3"], "max_stepz"),
    ],
)
def test_wrong_words_are_told_before_anything_runs(capsys, words, said):
    assert main(["verify", "--model", f"{HERE}.Clean", "--data", f"{HERE}.Data", "--trainer.max_steps=5", *words]) == 2
    assert said in capsys.readouterr().err
    assert os.listdir() == []
