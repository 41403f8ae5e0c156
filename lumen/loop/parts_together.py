"""A micro-batch that does not fit into memory is made in parts by all processes, where forwards communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

from lumen.data.nested import detached
from lumen.data.parts import cut, spans
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.internals.memory import drop_failed_backward, empty_device_cache, is_out_of_memory
from lumen.loop.around_step import mark, unnoticed
from lumen.loop.micro_batch import accumulate, loss_for_nothing
from lumen.loop.step_in_parts import Parts, agree_on_size, joined_outputs, say_size, smaller, weight_of_part
from lumen.random import GeneratorStates
from lumen.run.run import Run

_FOR_NOTHING = (
    "This process had run out of memory (halve_on_oom), and kept pace with the others for nothing, with parameters "
    "that are in part not the model's. Make batch_size of the loader smaller; global_batch_size keeps what a step is."
)


@final
class PartsTogether(Parts):
    """By all processes, if the memory of one does not suffice: they communicate in each forward.

    That one cannot stop where it is: the others wait for it in each unit. So it goes through the rest of the
    micro-batch with as many samples as fit, for nothing. Then all learn of it, put back what the step has changed, and
    make its micro-batches again, each in as many parts as the largest of the processes' has.
    """

    def __init__(self, run: Run, window: AccumulationWindow) -> None:
        super().__init__(run, window)
        self._cramped: set[int] = set()

    def accumulate(self, micro: MicroBatch, batch: Any) -> Any:
        """See `Parts.accumulate`. Collective: every rank must call this."""
        run, weighting = self._run, self._run.step.weighting
        logged = run.log.stage
        assert logged is not None
        self._made.append((micro, batch, GeneratorStates()))
        before, counted, put_back = logged.mark(), weighting.mark(), mark(run)
        fitted, output = self._attempt(micro, batch)
        while not fitted:
            if weighting.is_agreeing:
                weighting.agree()
            self._cramped |= agree_on_size(run)
            run.step.loss, run.step.dummy = None, fitting(run.step.dummy, run.progress.fits)
            logged.go_back(before)
            put_back()
            weighting.go_back(counted)
            drop(run, rejoins=False)
            before, put_back = logged.mark(), mark(run)  # each serves once
            fitted, output = self._attempt_all()
        if micro.last and self._cramped:
            say_size(run, self._cramped)
        run.log.batch_samples = micro.samples
        return output

    def _attempt_all(self) -> tuple[bool, Any]:
        """Make the gradients of all micro-batches of the step so far; only the newest is not counted already."""
        run, weighting = self._run, self._run.step.weighting
        run.optim.zero_grad(run.progress.epoch, self._window.first_index)
        for micro, batch, states in self._made[:-1]:
            counted = weighting.mark()
            states.restore()
            with unnoticed(run):
                fitted, _ = self._attempt(micro, batch, check=False)
            weighting.go_back(counted)
            if not fitted:
                return False, None
        micro, batch, states = self._made[-1]
        states.restore()
        return self._attempt(micro, batch)

    def _attempt(self, micro: MicroBatch, batch: Any, *, check: bool = True) -> tuple[bool, Any]:
        """Make a micro-batch in parts of the size that all have agreed on.

        Returns:
            Whether all processes could, and the output.
        """
        run, outputs, sizes, fitted = self._run, [], [], True
        for part, of_part in self._parts(micro, batch):
            run.log.batch_samples, rejoins = part.samples, fitted
            if fitted:
                try:
                    output, _ = accumulate(run, part, of_part, run.step.weighting, check=check)
                    if self._wanted and output is not None:
                        outputs.append(detached(output))
                        sizes.append(part.samples)
                except RuntimeError as error:
                    run.step.fits = smaller(error, part.samples)
                    fitted = False
            if not fitted:
                run.step.loss = None
                for_nothing = partial(self._for_nothing, part, of_part)
                run.step.fits = keep_pace(run, for_nothing, part.samples, run.step.fits, rejoins=rejoins)
        (failed,) = run.processes.sum([float(not fitted)])
        return not failed, joined_outputs(outputs, sizes) if outputs and not failed else None

    def _parts(self, micro: MicroBatch, batch: Any) -> Iterator[tuple[MicroBatch, Any]]:
        """As many on each process, the last of them the last of the step."""
        run = self._run
        pieces = common_cuts(micro, self._window.largest(micro), run.progress.fits)
        for number, (begin, end, is_dummy) in enumerate(pieces, 1):
            whole = end - begin == micro.samples
            weight = micro.weight if whole else weight_of_part(run, micro, begin, end)
            part = micro.part(end - begin, 0.0 if is_dummy else weight)
            part.is_dummy, part.last = is_dummy, micro.last and number == len(pieces)
            yield part, batch if whole else cut(batch, micro.samples, begin, end)

    def _for_nothing(self, part: MicroBatch, batch: Any, samples: int) -> None:
        run, weighting = self._run, self._run.step.weighting
        given = fitting((batch, part), samples), fitting(run.step.dummy, samples)
        with unnoticed(run), run.strategy.gradient_sync(part.last):
            loss, weight = loss_for_nothing(run, given)
            if weighting.unseeded:
                weighting.seed(None if part.is_dummy or weight is None else part.number, weight)
            if part.last and not weighting.is_agreeing:
                weighting.begin_agreement(run.step.skips_epoch, run.progress.should_stop, True)
            run.precision.backward(loss * 0.0)
            if part.last:
                run.strategy.after_backward()


def common_cuts(micro: MicroBatch, largest: int, fits: int) -> list[tuple[int, int, bool]]:
    """Where to cut a micro-batch, into as many parts on each process as the largest of theirs needs.

    Args:
        micro: The micro-batch of this process.
        largest: Samples of the largest one of all processes.
        fits: Samples of the largest part that is to be tried; 0: all.

    Returns:
        Of each part its first sample, the one after its last, and whether it is a dummy: there are no more.
    """
    own, others = ([*spans(0, size, fits or size)] for size in (micro.samples, largest))
    count = len(others)  # a dummy may be of more
    return [(*own[place % len(own)], micro.is_dummy or place >= len(own)) for place in range(count)]


def fitting(given: tuple[Any, MicroBatch] | None, samples: int) -> tuple[Any, MicroBatch] | None:
    """So many samples of a batch with its micro-batch, if it has more."""
    if given is None or given[1].samples <= samples:
        return given
    batch, micro = given
    return cut(batch, micro.samples, 0, samples), micro.part(samples, 0.0)


def keep_pace(run: Run, make: Callable[[int], None], samples: int, fits: int, *, rejoins: bool) -> int:
    """Go through a part with the others, or through what is left of it, with what fits and for nothing.

    Args:
        run: The run that trains or evaluates.
        make: Makes the part, of as many samples as it is given.
        samples: How many the part has.
        fits: Samples to try.
        rejoins: It goes on where an attempt of this process has failed.

    Returns:
        How many samples fit.

    Raises:
        RuntimeError: A single one does not.
    """
    while True:
        drop(run, rejoins=rejoins)
        size = min(samples, fits)
        try:
            make(size)
            return fits
        except Exception as error:
            if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
                error.add_note(_FOR_NOTHING)
                raise
            fits, rejoins = smaller(error, size), True


def drop(run: Run, *, rejoins: bool) -> None:
    """Free what a forward or backward that has failed has left behind; see `Strategy.allow_retries`."""
    drop_failed_backward()
    run.strategy.allow_retries()(rejoins)
    empty_device_cache(run.strategy.device)
