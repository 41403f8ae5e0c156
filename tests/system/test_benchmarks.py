"""Benchmarks: correct results at sizes whose figures mean nothing."""

import json
import random
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import benchmarks
from benchmarks.__main__ import library_commit, measure as measure_case
from benchmarks.cases import CASES, PEERS
from benchmarks.commands import run_commands
from benchmarks.gaps import Gaps
from benchmarks.growing import CASES as GROWING
from benchmarks.growth import (
    BEGIN as GROWTH_BEGIN,
    END as GROWTH_END,
    exponent,
    measure as measure_growth,
    unpack,
    write_readme as write_growth,
)
from benchmarks.plot import sketch
from benchmarks.problem import Problem
from benchmarks.ratios import Row, refusal, rows_of
from benchmarks.report import BEGIN, END, markdown, print_case, speed, write_readme
from benchmarks.rounds import installed, run_round
from benchmarks.worker import measure

HERE = [
    case.name
    for case in CASES.values()
    if case.kind in ("train", "evaluate", "checkpoint", "nothing") and case.ranks == 1 and case.device == "cpu"
]
ROOT = Path(benchmarks.__file__).parents[1]
SAMPLE = {"loss": (0.5).hex(), "digest": "a", "result": None}


@pytest.fixture(autouse=True)
def _state_of_torch():
    """Restore torch's settings, which the worker sets for its process: here, the process of other tests."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", HERE)
def test_lumen_equals_manual_loop_exactly(name, tmp_path):
    case = CASES[name].small()
    samples = []
    for system in ("hand", "lumen"):
        (tmp_path / system).mkdir()
        samples.append(measure(case, system, tmp_path / system))
    by_hand, own = samples
    assert refusal(case, "lumen", {"hand": by_hand, "lumen": own}) is None
    figures = own[case.measure]
    assert len(figures) == (case.turns * case.epochs if case.takes_turns else 1)
    assert case.measure == "blocked_s" or min(figures) > 0


@pytest.mark.parametrize(("system", "seeds"), [("lumen", True), ("lumen-own", False)])
def test_python_overhead_is_measured_without_seeding(system, seeds, tmp_path, monkeypatch):
    keys = []
    monkeypatch.setattr("lumen.random._seed_torch", keys.append)
    case = CASES["nothing"].small()
    (cpu_s,) = measure(case, system, tmp_path)["cpu_s"]
    assert cpu_s > 0
    assert len(set(keys)) >= case.batches if seeds else not keys


@pytest.mark.parametrize(("name", "draws"), [("tiny", False), ("tiny-draws", True)])
def test_only_one_case_has_data_that_draw(name, draws, tmp_path):
    data = Problem(CASES[name].small(), "lumen", tmp_path).loader().dataset
    state = random.getstate()
    assert data[0][0].shape == (16,)
    assert (random.getstate() != state) is draws


@pytest.mark.filterwarnings("ignore")  # of the other libraries
@pytest.mark.parametrize("name", ["evaluation-loss", "evaluation-metric"])
@pytest.mark.parametrize("system", [each for each in ("hand", "lumen", *PEERS) if installed(each)])
def test_every_system_evaluates_batches_once_in_inference_mode(system, name, tmp_path, monkeypatch):
    compute, modes = torch.nn.functional.cross_entropy, []

    def count(*inputs):
        modes.append(torch.is_inference_mode_enabled())
        return compute(*inputs)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", count)
    case, samples = CASES[name].small(), {}
    for each in ("hand", system):
        modes.clear()
        (tmp_path / each).mkdir(exist_ok=True)
        samples[each] = measure(case, each, tmp_path / each)
    assert modes == [True] * case.batches
    assert refusal(case, system, samples) is None


@pytest.mark.slow
def test_an_import_is_measured_above_that_of_torch():
    found = run_commands(CASES["import"], ["hand", "lumen"], starts=1)
    (torch_s,), (both_s,) = found["hand"]["cpu_s"], found["lumen"]["cpu_s"]
    assert 0 < both_s - torch_s < torch_s / 2


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if case.measure == "gap_s"])
def test_gaps_are_traced_on_device_of_case(name, tmp_path):
    case = replace(CASES[name].small(), device="cpu", compiled=False, tolerance=0.0)
    samples = {}
    for system in ("hand", "lumen"):
        (tmp_path / system).mkdir()
        samples[system] = measure(case, system, tmp_path / system)
        (gap_s,) = samples[system]["gap_s"]
        assert 0 < gap_s < samples[system]["wall_s"][0]
    assert refusal(case, "lumen", samples) is None


def test_gap_is_time_between_operations_however_nested():
    gaps, matrix = Gaps("cpu"), torch.randn(64, 64)
    gaps.enable()
    begin_s = time.perf_counter()
    torch.linalg.norm(matrix @ matrix)  # composed of operators that run inside of others
    time.sleep(0.2)
    torch.linalg.norm(matrix @ matrix)
    whole_s = time.perf_counter() - begin_s
    gaps.disable()
    assert 0.19 <= gaps.seconds < whole_s  # the trace has a different clock


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp2-tiny", "fsdp2-tiny"])
def test_two_processes_take_turns_and_end_alike(name):
    case = CASES[name]
    found = run_round(case, ["hand", "lumen"], "--small")
    assert refusal(case, "lumen", found) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": (0.5 + 2**-20).hex()}, "final loss"),
        ({"loss": float("nan").hex()}, "final loss"),
        ({"digest": "b"}, "parameters"),
        ({"result": 0.5}, "result"),
    ],
)
def test_a_system_that_computes_something_else_is_refused(changed, message):
    by_hand = SAMPLE | {"result": 0.25} if "result" in changed else SAMPLE
    case, samples = CASES["tiny"], {"hand": by_hand, "again": dict(by_hand), "lumen": by_hand | changed}
    assert refusal(case, "again", samples) is None
    assert message in refusal(case, "lumen", samples)
    assert "out of memory" in refusal(case, "lumen", {"hand": by_hand, "lumen": "out of memory"})


def test_fused_optimizers_are_compared_with_fused_manual_loop():
    near, far = SAMPLE | {"loss": (0.501).hex()}, SAMPLE | {"loss": (0.6).hex()}
    case, samples = CASES["tiny-tensor"], {"hand": SAMPLE, "hand-fused": near, "lumen": near, "ignite": SAMPLE}
    assert refusal(case, "hand-fused", samples) is refusal(case, "lumen", samples) is None
    assert "by hand 0.501" in refusal(case, "ignite", samples)
    assert "by hand 0.5" in refusal(case, "hand-fused", samples | {"hand-fused": far})


MACHINE = {"cpu": "Abacus", "accelerator": "", "cores": 2, "python": "3.11", "torch": "2.13"}


def results(lumen_loss=0.5):
    """Return two rounds in which Lumen takes 1.1 times as long, disturbed in one of them."""
    turns = [1e-3, 2e-3] * 10
    hand = SAMPLE | {"cpu_s": turns * 4}
    lumen = SAMPLE | {"loss": lumen_loss.hex(), "cpu_s": [1.1 * each for each in turns] * 4}
    disturbed = lumen | {"cpu_s": [5 * each for each in lumen["cpu_s"]]}
    return {
        "cases": {
            "tiny": {
                "machine": MACHINE,
                "date": "2026-01-01",
                "definition": CASES["tiny"].definition,
                "peers": {},
                "turns": 10,
                "systems": ["hand", "lumen", "ignite"],
                "skipped": {"ignite": "not installed"},
                "rounds": [{"hand": hand, "lumen": lumen}, {"hand": hand, "lumen": disturbed}],
            }
        }
    }


def test_the_best_ratio_is_that_of_undisturbed_turns():
    hand, lumen, ignite = rows_of("tiny", results()["cases"]["tiny"])
    assert hand.best == hand.quartiles[1] == 1.0
    assert lumen.best == pytest.approx(1.1)
    assert lumen.quartiles[2] > 5
    assert ignite.trouble == "not installed"


def test_refused_row_shows_both_values_and_no_ratio(tmp_path):
    console = Console(width=120, record=True, file=(tmp_path / "table.txt").open("w"))
    print_case("tiny", results(0.75), console)
    text = console.export_text()
    assert "0.75" in text
    assert "by hand 0.5" in text
    assert "1.1" not in text
    console.file.close()


def test_readme_figures_are_written_between_markers(tmp_path):
    readme = Path(benchmarks.__file__).with_name("README.md")
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    for _ in range(2):
        write_readme(json.loads(json.dumps(results())), copy)
    before, rest = copy.read_text().split(BEGIN)
    figures, after = rest.split(END)
    assert (before, after) == (readme.read_text().split(BEGIN)[0], readme.read_text().split(END)[1])
    assert figures.count("**tiny**") == 1
    assert "1.100" in figures
    assert "Abacus" in figures
    assert "not installed" in figures


@pytest.mark.parametrize("definition", [None, replace(CASES["tiny"], batch_size=64).definition])
def test_figures_of_changed_cases_are_stale(definition, tmp_path):
    old = results()
    old["cases"]["tiny"]["definition"] = definition
    assert "| **tiny**, goal 1.03 | by hand | stale |  |  |  |  |" in markdown(old)
    assert "1.100" not in markdown(old)
    with (tmp_path / "table.txt").open("w") as file:
        console = Console(width=120, record=True, file=file)
        print_case("tiny", old, console)
        text = console.export_text()
    assert "Lumen: stale" in text
    assert "1.100" not in text


def test_description_and_goal_are_no_part_of_definition():
    case = CASES["tiny"]
    assert replace(case, about="?", goal=2.0, rounds=1, systems=("hand",)).definition == case.definition
    assert json.loads(json.dumps(CASES["checkpoint"].definition)) == CASES["checkpoint"].definition


def test_heading_has_dates_and_peers_of_valid_figures():
    found = results()
    again = found["cases"]["tiny"] | {"date": "2026-02-03", "definition": CASES["clip"].definition}
    stale = found["cases"]["tiny"] | {"date": "2025-01-01", "peers": {"accelerate": "1.0"}}
    found["cases"] |= {"clip": again | {"peers": {"ignite": "0.5"}}, "tiny-log1": stale}
    heading = markdown(found).splitlines()[0]
    assert heading == "2026-01-01 to 2026-02-03, Abacus, 2 cores, Python 3.11, torch 2.13, ignite 0.5."


def test_each_machine_is_named_with_its_cases():
    found = results()
    device = found["cases"]["tiny"] | {"definition": CASES["clip"].definition}
    found["cases"]["clip"] = device | {"machine": MACHINE | {"accelerator": "GPU of thought"}}
    first, second, *_ = markdown(found).splitlines()
    assert first == "2026-01-01, Abacus, 2 cores, Python 3.11, torch 2.13: all others."
    assert second == "2026-01-01, GPU of thought, Abacus, 2 cores, Python 3.11, torch 2.13: clip."


def test_gpt_wall_time_includes_tokens_per_second():
    case, sample = CASES["gpt2-cuda"], SAMPLE | {"wall_s": [0.1]}
    found = {
        "date": "2026-01-01", "machine": MACHINE, "definition": case.definition, "peers": {}, "turns": 1,
        "systems": ["hand"], "skipped": {}, "rounds": [{"hand": sample}],
    }  # fmt: skip
    text = markdown({"cases": {case.name: found}})
    assert "100,000.0 µs / batch (122,880 tokens/s)" in text
    row = Row(case.name, "hand", value=0.1)
    assert speed(CASES["gpt"], "cpu_s", row) == speed(CASES["tiny"], "wall_s", row) == ""


def test_negative_cost_after_a_save_has_no_ratio():
    case, rounds = CASES["checkpoint"], [(0.5, -0.25), (1.0, 0.5), (3.0, -2.0)]
    found = {
        "date": "2026-01-01", "machine": MACHINE, "definition": case.definition, "peers": {}, "turns": 1,
        "systems": ["hand", "lumen"], "skipped": {}, "rounds": [
            {
                "hand": SAMPLE | {"blocked_s": [1.0], "lost_s": [by_hand]},
                "lumen": SAMPLE | {"blocked_s": [0.5], "lost_s": [own]},
            }
            for by_hand, own in rounds
        ],
    }  # fmt: skip
    text = markdown({"cases": {case.name: found}})
    assert "|  | Lumen | 0.50 s | -0.50 | 0.500 | 0.500 | 0.500 - 0.500 |" in text
    assert "|  | Lumen | -0.25 s | -0.75 |  |  |  |" in text


@pytest.mark.slow
def test_stored_case_includes_definition_and_commit():
    found = json.loads(json.dumps(measure_case(CASES["nothing"], ["hand"], 1)))
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout
    assert head.startswith(found["commit"].rstrip("+")) if head else "commit" not in found
    text = markdown({"cases": {"nothing": found}})
    assert text.startswith(found["date"])
    assert "by hand" in text
    assert "stale" not in text


def test_commit_is_marked_if_the_library_differs(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.HOME", tmp_path / "benchmarks")
    assert library_commit() is None
    for folder in ("lumen", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    library, figures = tmp_path / "lumen" / "loop.py", tmp_path / "benchmarks" / "results" / "results.json"
    for file in (library, figures):
        file.write_text("1")
    for words in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, check=True)
    commit = library_commit()
    assert commit.isalnum()
    figures.write_text("2")
    assert library_commit() == commit
    library.write_text("2")
    assert library_commit() == f"{commit}+"


@pytest.mark.filterwarnings("ignore")  # as in the processes that measure
@pytest.mark.parametrize("case", GROWING.values(), ids=list(GROWING))
def test_growth_is_measured_for_lumen_and_manual_code(case, tmp_path, monkeypatch):
    size = 3 if case.sizes[0] > 3 else case.sizes[0]
    for number, function in enumerate((case.measure, case.by_hand)):
        if function is not None:
            (tmp_path / str(number)).mkdir()
            monkeypatch.chdir(tmp_path / str(number))
            assert function(size) > 0


def test_exponent_is_the_power_of_the_last_growth():
    assert exponent({10: 5.0, 100: 1.0, 1000: 100.0}) == pytest.approx(2)
    assert exponent({10: 5.0, 1000: 5.0}) == 0


def test_growth_report_has_sizes_systems_and_exponents(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{GROWTH_BEGIN}\nold\n{GROWTH_END}\nafter\n")
    found = {"resume": {"by hand": {100: 0.001, 1000: 0.01}, "Lumen": {100: 0.002, 1000: 0.2}}}
    write_growth(found, page)
    text = page.read_text()
    assert (
        "| **resume**: a resume to the first step, by parameters, 100 / 1,000 | by hand | 1.0 / 10.0 ms | 1.00 |"
        in text
    )
    assert "|  | Lumen | 2.0 / 200.0 ms | 2.00 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text


@pytest.mark.slow
def test_another_commits_lumen_is_measured_beside_this_one(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not proven here: this is no checkout")
    libraries = {"Lumen": ROOT, "Lumen HEAD": unpack("HEAD", tmp_path)}
    found = measure_growth(replace(GROWING["chunks"], rounds=1), libraries, most=20)
    assert found.keys() == {"Lumen", "Lumen HEAD"}
    assert all(list(values) == [20] for values in found.values())


def test_readme_picture_matches_the_results(tmp_path):
    folder = ROOT / "benchmarks/results"
    sketch(json.loads((folder / "results.json").read_text()), tmp_path / "cost.svg")
    assert (tmp_path / "cost.svg").read_text() == (folder / "cost.svg").read_text()
