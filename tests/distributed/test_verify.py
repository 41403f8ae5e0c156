"""`lumen verify` on two processes: confirms that they train like one, or names the reason and the place."""

from functools import partial

import pytest

from lumen.tools.proof.outcome import FLOAT64, compare_values
from lumen.tools.proof.variants import NAME, Variant
from lumen.tools.proof.worker import VariantResult
from tests.helpers import verified_tasks
from tests.helpers.verified_tasks import Clean, Make, Within, find_cause, observe


def observe_on_two(group, folder, make, strategy="ddp", **changes):
    """Return the results of two processes."""
    variant = Variant("two", 2, strategy, **changes)
    results = group(2).run(observe, folder, variant, make)
    return VariantResult(variant, folder / "two", [each.outcomes[0] for each in results], results[0].failure)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_compute_what_one_does(tmp_path, group, strategy):
    make = Make(partial(Clean, dropout=0.3))
    assert (
        find_cause(observe(tmp_path, Variant("one"), make), observe_on_two(group, tmp_path, make, strategy), FLOAT64)
        is None
    )


def test_unsynchronized_batch_norm_is_named_and_no_failure(tmp_path, group):
    make = Make(partial(Within, "Norm"))
    cause = find_cause(observe(tmp_path, Variant("one"), make), observe_on_two(group, tmp_path, make), FLOAT64)
    assert cause.kind == "BatchNorm statistics differ between processes"
    assert (cause.place, cause.verdict) == ("net.2.norm", "not promised")


def test_callback_on_rank_0_only_is_named(tmp_path, group):
    make = Make(Clean, callbacks=[verified_tasks.OnRankZero])
    two = observe_on_two(group, tmp_path, make)
    cause = find_cause(observe(tmp_path, Variant("one"), make), two, FLOAT64)
    assert cause.kind == "a hook acts on one rank only"
    assert cause.place.startswith("OnRankZero.on_step_end (")
    assert "net.0.weight" in cause.text
    assert "only rank 0 writes the value" in cause.text


def test_manually_averaged_metric_is_named_with_its_line(tmp_path, group):
    make = Make(verified_tasks.ByHand)
    checkpoint = observe(tmp_path, Variant("one"), make).folder / NAME / "checkpoints/step-00000004"
    first = observe(tmp_path, Variant("first", evaluates=True, resume=str(checkpoint)), make)
    two = observe_on_two(group, tmp_path, make, evaluates=True, resume=str(checkpoint))
    assert compare_values(first.outcome, two.outcome, FLOAT64)[0] > 1e-6
    cause = find_cause(first, two, FLOAT64)
    assert cause.kind == "a metric is averaged by hand"
    assert cause.place.startswith("val_loss, logged in on_validation_epoch_end (")
