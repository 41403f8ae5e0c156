"""`lumen verify` on one process: confirms that two runs are equal, or names the reason and the place."""

from functools import partial

import pytest
import torch
import torchmetrics

import lumen
from lumen.errors import ConfigError
from lumen.tools.proof.causes import find_suspects
from lumen.tools.proof.observer import find_source_lines
from lumen.tools.proof.outcome import FLOAT32, FLOAT64, Outcome, compare_outcomes, compare_values, merge_outcomes
from lumen.tools.proof.variants import NAME, Variant
from lumen.tools.proof.worker import describe_error
from tests.helpers import verified_tasks
from tests.helpers.verified_tasks import Clean, Make, OtherData, Within, find_cause, observe

STATES = ("start", "gradient", "parameter", "buffer", "optimizer")


def find_line(name, text):
    """Return file:line of a text in a class of the helpers."""
    file, first, last = find_source_lines(getattr(verified_tasks, name))
    with open(file) as source:
        numbered = list(enumerate(source, 1))
    return next(f"{file}:{number}" for number, each in numbered if first <= number <= last and text in each)


def verify_repetition(folder, make):
    """Return the cause of the difference between a run and its repetition."""
    return find_cause(*(observe(folder, Variant(name, exact=True), make) for name in ("base", "again")))


def verify_resume(folder, make):
    """Return the cause of the difference between a run and its resume, in another process or in this one."""
    base = observe(folder, Variant("base", exact=True), make)
    checkpoint = base.folder / NAME / "checkpoints/step-00000002"
    return find_cause(base, observe(folder, Variant("resumed", exact=True, resume=str(checkpoint)), make))


def verify_accumulation(folder, make):
    """Return the cause of the difference between steps of two micro-batches and steps of one twice as large."""
    return find_cause(*(observe(folder, Variant(f"joins-{joins}", joins=joins), make) for joins in (False, True)),
               FLOAT64, STATES)  # fmt: skip


# ---------------------------------------------------------------------- no findings without a fault


@pytest.mark.parametrize("compared", [verify_repetition, verify_resume])
def test_dropout_and_schedule_are_reproducible(tmp_path, compared):
    assert compared(tmp_path, Make(partial(Clean, dropout=0.3))) is None


def test_manual_optimization_is_tried_without_accumulation(tmp_path):
    result = observe(tmp_path, Variant("base", exact=True), Make(verified_tasks.ByOwnHand))
    assert (result.failure, result.outcome.by_hand) == (None, True)
    assert max(event.step for event in result.outcome.iterate_events("parameter")) == verified_tasks.SIZE.steps


def test_unused_leftover_gradients_are_no_difference(tmp_path):
    assert verify_resume(tmp_path, Make(verified_tasks.InTurns)) is None


def test_hook_that_writes_parameters_resumes_exactly(tmp_path):
    assert verify_resume(tmp_path, Make(verified_tasks.Decays)) is None


def test_sample_mean_is_independent_of_micro_batches(tmp_path):
    assert verify_accumulation(tmp_path, Make(Clean)) is None


def test_dropout_makes_micro_batch_sizes_incomparable(tmp_path):
    cause = verify_accumulation(tmp_path, Make(partial(Clean, dropout=0.3)))
    assert (cause.kind, cause.verdict) == ("not comparable", "not shown")


def test_a_difference_is_found_where_it_begins(tmp_path):
    base = observe(tmp_path, Variant("base", exact=True), Make(Clean))
    other = observe(tmp_path, Variant("other", exact=True), Make(partial(Clean, lr=2e-2)))
    found = compare_outcomes(merge_outcomes(base.outcomes), merge_outcomes(other.outcomes), 0.0)
    assert (found.at.step, found.at.kind, found.at.name) == (1, "parameter", "net.0.weight")
    assert 1e-3 < found.largest < 1


def test_only_torchmetrics_sums_may_differ_by_rounding():
    mae = torchmetrics.MeanAbsoluteError()
    mae.update(torch.arange(7.0) / 3, torch.zeros(7))
    value = mae.compute().item()
    rounded = torch.nextafter(torch.tensor(value), torch.tensor(9.0)).item()

    def apart(one, other, tolerance=FLOAT64):
        return compare_values(*(Outcome(rows=[(1, {"mae": each})]) for each in (one, other)), tolerance)

    assert apart(value, rounded) == (0.0, [], {"mae"})
    for other in (value + 1e-7, rounded * 1.001, float("nan")):  # in float64, no value is too far away
        assert apart(value, other)[1] == ["mae"]
    assert apart(value, rounded, 0.0)[1] == ["mae"]
    assert apart(200000.0, 200001.0, FLOAT32)[1] == ["mae"]  # included in the count


def test_missing_evaluation_value_is_a_difference():
    whole, less = Outcome(values={"loss": 0.5, "hits": 7.0}), Outcome(values={"hits": 7.0})
    assert compare_values(whole, whole, FLOAT64) == (0.0, [], set())
    assert compare_values(whole, less, FLOAT64) == (float("inf"), ["loss"], set())


# ---------------------------------------------------------------------- faults of modules


def test_system_entropy_in_a_module_is_named(tmp_path):
    cause = verify_repetition(tmp_path, Make(partial(Within, "Entropy")))
    assert cause.kind == "unseeded randomness"
    assert "net.2 (Entropy)" in cause.place
    assert find_line("Entropy", "os.urandom") in cause.place


def test_generator_of_a_module_is_named_on_resume(tmp_path):
    make = Make(partial(Within, "OwnGenerator"))
    cause = verify_resume(tmp_path, make)
    assert cause.kind == "unseeded randomness"
    assert find_line("OwnGenerator", "torch.Generator()") in cause.place


def test_unsaved_counter_is_named_on_resume(tmp_path):
    cause = verify_resume(tmp_path, Make(partial(Within, "Counts")))
    assert cause.kind == "state is kept in a module"
    assert "net.2 (Counts)" in cause.place


def test_unkeyed_initialization_names_the_parameter(tmp_path):
    cause = verify_repetition(tmp_path, Make(verified_tasks.BuiltApart))
    assert cause.kind == "unseeded initialization"
    assert cause.place == f"net.0.weight, {find_line('BuiltApart', 'os.urandom')}"


def test_token_loss_without_weight_names_the_count(tmp_path):
    cause = verify_accumulation(tmp_path, Make(verified_tasks.Tokens, verified_tasks.Marked))
    assert cause.kind == "the loss is divided by the micro-batch's own count"
    assert cause.verdict == "failed"
    assert "batch[2] != 0: 2 in the first micro-batch, 3 in the second" in cause.text
    assert find_source_lines(verified_tasks.Tokens)[0] in cause.place


def test_batch_norm_over_micro_batches_is_not_promised(tmp_path):
    cause = verify_accumulation(tmp_path, Make(partial(Within, "Norm")))
    assert (cause.place, cause.verdict) == ("net.2.norm", "not promised")


def test_contrastive_loss_is_not_promised(tmp_path):
    cause = verify_accumulation(tmp_path, Make(verified_tasks.Contrasts))
    assert (cause.kind, cause.verdict) == ("the loss couples samples", "not promised")


def test_batch_norm_moved_by_validation_hook_is_named(tmp_path):
    result = observe(tmp_path, Variant("base", exact=True), Make(verified_tasks.MovesNorm))
    cause = verified_tasks.explain_validation_change(result.outcome)
    assert cause.place == "net.2"
    assert "net.2.running_mean" in cause.text
    assert "training mode" in cause.text


# ---------------------------------------------------------------------- faults of data


def test_time_dependent_sample_is_named_with_line(tmp_path):
    cause = verify_repetition(tmp_path, Make(Clean, partial(OtherData, "Clock")))
    assert (cause.kind, cause.place) == ("unseeded randomness", find_line("Clock", "time.time()"))


def test_sample_depending_on_previous_is_named_on_resume(tmp_path):
    cause = verify_resume(tmp_path, Make(Clean, partial(OtherData, "Remembers")))
    assert (cause.kind, cause.place) == ("state is kept in a dataset", find_line("Remembers", "class Remembers"))


def test_dataset_changing_during_run_is_named(tmp_path):
    cause = verify_resume(tmp_path, Make(Clean, partial(OtherData, "Growing")))
    assert (cause.kind, cause.place) == ("a dataset changes during the run", find_line("Growing", "class Growing"))


def test_unkeyed_sampler_is_named_with_line(tmp_path):
    cause = verify_repetition(tmp_path, Make(Clean, partial(OtherData, sampler="OwnOrder")))
    assert (cause.kind, cause.place) == ("unseeded sampler", find_line("OwnOrder", "default_rng()"))


# ---------------------------------------------------------------------- one cause for each fault

UNSEEDED, UNSAVED = "unseeded randomness", "the update keeps state that is not saved"
#: Task and data with a fault; the kind of the cause; class or function, and text of the line that is named.
FAULTS = {
    "function of a dataset": (Make(Clean, partial(OtherData, "SystemNoise")), UNSEEDED, "add_noise", "SYSTEM.random()"),
    "collate function": (Make(Clean, partial(OtherData, collates=True)), UNSEEDED, "collate_with_noise", "os.urandom"),
    "sampler": (Make(Clean, partial(OtherData, sampler="OwnOrder")), "unseeded sampler", "OwnOrder", "default_rng()"),
    "file": (Make(Clean, partial(OtherData, "ReadsLog")), "a file changes", "ReadsLog", "open("),
    "module": (Make(partial(Within, "Entropy")), UNSEEDED, "Entropy", "os.urandom"),
    "step": (Make(verified_tasks.NoisyStep), UNSEEDED, "NoisyStep", "os.urandom"),
    "loss": (Make(verified_tasks.TimedLoss), UNSEEDED, "TimedLoss", "time.time()"),
    "backward": (Make(verified_tasks.NoisyGradient), UNSEEDED, "NoisyBackward", "os.urandom"),
    "hook on gradients": (Make(verified_tasks.NoisyHook), UNSEEDED, "NoisyHook", "os.urandom"),
    "hook on parameters": (
        Make(verified_tasks.WritesNoise), "a hook writes different values", "WritesNoise", "on_step_end",
    ),
    "update": (Make(partial(verified_tasks.Updated, "NoisySGD")), UNSEEDED, "NoisySGD", "os.urandom"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "name", "text"), FAULTS.values(), ids=FAULTS)
def test_fault_that_differs_when_repeated_is_placed(tmp_path, monkeypatch, make, kind, name, text):
    monkeypatch.chdir(tmp_path)
    base = observe(tmp_path, Variant("base", exact=True), make)
    cause = find_cause(base, observe(tmp_path, Variant("again", exact=True, fresh=True), make))
    assert cause.kind == kind, cause.text
    assert find_line(name, text) in cause.place


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (Make(partial(verified_tasks.Updated, "CountingSGD")), UNSAVED, "CountingSGD"),
        (Make(verified_tasks.CountsCalls), "state is kept in a module", "CountsCalls"),
    ],
    ids=["update", "global counter"],
)
def test_state_lost_in_a_resume_is_placed(tmp_path, make, kind, name):
    base = observe(tmp_path, Variant("base", exact=True), make)
    base.outcome.repeats = True  # as the proof knows
    checkpoint = str(base.folder / NAME / "checkpoints/step-00000002")
    cause = find_cause(base, observe(tmp_path, Variant("resumed", exact=True, resume=checkpoint), make))
    assert (cause.kind, cause.verdict) == (kind, "failed"), cause.text
    assert find_line(name, f"class {name}") in cause.place


# ---------------------------------------------------------------------- place of a fault


def test_only_unseeded_lines_are_suspects(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("import numpy as np\na = np.random.default_rng(3)\nb = np.random.default_rng()\nc = {*'ab'}\n"
                      "for each in {'a', 'b'}:\n    pass\nfor each in sorted({'a', 'b'}):\n    pass\n")  # fmt: skip
    assert [each.line for each in find_suspects((str(source), 1, 8))] == [3, 5]
    assert find_suspects((str(source), 4, 4)) == []
    assert find_suspects(None) == []


def test_a_failure_is_placed_in_the_users_code():
    with pytest.raises(ConfigError) as caught:
        lumen.Trainer(max_steps="many")
    assert describe_error(caught.value)["place"].startswith(f"{__file__}:")
