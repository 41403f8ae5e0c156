"""What a micro-batch counts in its step: found from the gradients of two micro-batches and that of both as one."""

from __future__ import annotations

from lumen.proof.outcome import Outcome

_FITS = 1e-6


def cause_of_parts(ours: Outcome, theirs: Outcome) -> str | None:
    """By what weights two gradients add up to that of both batches together, and what in the batches these count.

    The numbers of a gradient are linear in it but for the norm, so that they add up as gradients do.

    Args:
        ours: A step of micro-batches, with what the gradients were after each of them.
        theirs: The same samples in half as many.

    Returns:
        A sentence; None: it is no weighted mean of them.
    """
    micro = sorted({event.micro for event in ours.of("partial") if event.step == 0})[:2]
    joint = sorted({event.micro for event in theirs.of("partial") if event.step == 0})[:1]
    if len(micro) < 2 or not joint:
        return None
    sums = [_vector(ours, number) for number in micro]
    both = _vector(theirs, joint[0])
    names = [name for name in sums[0] if name in sums[1] and name in both]
    first = [number for name in names for number in sums[0][name]]
    second = [b - a for name in names for a, b in zip(sums[0][name], sums[1][name], strict=True)]
    total = [number for name in names for number in both[name]]
    share = _share(first, second, total)
    if share is None:
        return None
    counts = [ours.counts.get(number, {}) for number in micro]
    named = [
        what for what, one in counts[0].items()
        if one and (other := counts[1].get(what)) and what != "samples" and abs(one / (one + other) - share) < _FITS
    ]  # fmt: skip
    one, other = (each.get(named[0] if named else "samples", 0) for each in counts)
    found = f"where {named[0]}: {one} in the first micro-batch, {other} in the second" if named else "of some kind"
    return (
        f"two micro-batches count {share:.4f} and {1 - share:.4f} in the gradient of both together, not one half each: "
        f"the loss is a mean over units {found}. Return (loss, weight) with that count as the weight."
    )


def _vector(outcome: Outcome, micro: int) -> dict[str, tuple[float, ...]]:
    first = (event for event in outcome.of("partial") if (event.step, event.micro) == (0, micro))
    return {event.name: event.numbers[1:] for event in first}


def _share(first: list[float], second: list[float], total: list[float]) -> float | None:
    """The weight w for which 2 w first + 2 (1 - w) second is total: each of the two was counted as one half."""
    apart = [2 * (a - b) for a, b in zip(first, second, strict=True)]
    rest = [t - 2 * b for t, b in zip(total, second, strict=True)]
    square = sum(a * a for a in apart)
    if not square:
        return None
    share = sum(a * r for a, r in zip(apart, rest, strict=True)) / square
    missed = max(abs(r - share * a) for a, r in zip(apart, rest, strict=True))
    fits = missed <= _FITS * max(abs(number) for number in total) and 0 < share < 1
    return share if fits else None
