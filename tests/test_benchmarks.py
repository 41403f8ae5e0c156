"""The benchmarks compute what they say, at sizes where their figures mean nothing."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import benchmarks
from benchmarks import nothing
from benchmarks.cases import CASES
from benchmarks.gaps import Gaps
from benchmarks.ratios import refusal, rows_of
from benchmarks.report import BEGIN, END, print_case, write_readme
from benchmarks.rounds import run_round
from benchmarks.worker import measure

HERE = [
    case.name
    for case in CASES.values()
    if case.kind in ("train", "evaluate", "checkpoint") and case.ranks == 1 and case.device == "cpu"
]
SAMPLE = {"loss": (0.5).hex(), "digest": "a", "result": None}


@pytest.fixture(autouse=True)
def _state_of_torch():
    """The worker sets it for its process, which here is that of the other tests too."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", HERE)
def test_lumen_ends_with_the_bits_of_the_loop_by_hand(name, tmp_path):
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


def test_a_step_of_nothing_is_measured_by_hand_and_by_lumen(capsys):
    found = nothing.main(steps=50, epochs=2)
    assert list(found) == ["by hand", "Lumen's own Python", "Lumen"]
    assert min(found.values()) > 0
    assert capsys.readouterr().out.count("µs CPU / step") == 3


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if case.measure == "gap_s"])
def test_gaps_are_traced_on_the_device_of_the_case(name, tmp_path):
    case = replace(CASES[name].small(), device="cpu", compiled=False, tolerance=0.0)
    samples = {}
    for system in ("hand", "lumen"):
        (tmp_path / system).mkdir()
        samples[system] = measure(case, system, tmp_path / system)
        (gap_s,) = samples[system]["gap_s"]
        assert 0 < gap_s < samples[system]["wall_s"][0]
    assert refusal(case, "lumen", samples) is None


def test_a_gap_is_the_time_between_two_operations_however_they_are_nested():
    gaps, matrix = Gaps("cpu"), torch.randn(64, 64)
    gaps.enable()
    begin_s = time.perf_counter()
    torch.linalg.norm(matrix @ matrix)  # made of operators that run inside of others
    time.sleep(0.2)
    torch.linalg.norm(matrix @ matrix)
    whole_s = time.perf_counter() - begin_s
    gaps.disable()
    assert 0.2 <= gaps.seconds < whole_s


@pytest.mark.slow
def test_two_processes_take_turns_and_end_alike():
    case = CASES["ddp2-tiny"]
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


def test_a_fused_optimizer_is_compared_with_the_fused_loop_by_hand():
    near, far = SAMPLE | {"loss": (0.501).hex()}, SAMPLE | {"loss": (0.6).hex()}
    case, samples = CASES["tiny-tensor"], {"hand": SAMPLE, "hand-fused": near, "lumen": near, "ignite": SAMPLE}
    assert refusal(case, "hand-fused", samples) is refusal(case, "lumen", samples) is None
    assert "by hand 0.501" in refusal(case, "ignite", samples)
    assert "by hand 0.5" in refusal(case, "hand-fused", samples | {"hand-fused": far})


def results(lumen_loss=0.5):
    """Two rounds in which Lumen takes 1.1 times as long, once disturbed."""
    turns = [1e-3, 2e-3] * 10
    hand = SAMPLE | {"cpu_s": turns * 4}
    lumen = SAMPLE | {"loss": lumen_loss.hex(), "cpu_s": [1.1 * each for each in turns] * 4}
    disturbed = lumen | {"cpu_s": [5 * each for each in lumen["cpu_s"]]}
    return {
        "machine": {"date": "2026-01-01", "cpu": "Abacus", "cores": 2, "python": "3.11", "torch": "2.13"},
        "cases": {
            "tiny": {
                "turns": 10,
                "systems": ["hand", "lumen", "ignite"],
                "skipped": {"ignite": "not installed"},
                "rounds": [{"hand": hand, "lumen": lumen}, {"hand": hand, "lumen": disturbed}],
            }
        },
    }


def test_the_best_ratio_is_that_of_undisturbed_turns():
    hand, lumen, ignite = rows_of("tiny", results()["cases"]["tiny"])
    assert hand.best == hand.quartiles[1] == 1.0
    assert lumen.best == pytest.approx(1.1)
    assert lumen.quartiles[2] > 5
    assert ignite.trouble == "not installed"


def test_a_refused_row_has_both_values_and_no_ratio(tmp_path):
    console = Console(width=120, record=True, file=(tmp_path / "table.txt").open("w"))
    print_case("tiny", results(0.75), console)
    text = console.export_text()
    assert "0.75" in text
    assert "by hand 0.5" in text
    assert "1.1" not in text
    console.file.close()


def test_figures_of_the_readme_are_written_between_its_markers(tmp_path):
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
