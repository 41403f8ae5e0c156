"""Iterator over batches that can resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from lumen.console import logger as _log
from lumen.data.adapter import Position, SampleCounter
from lumen.data.dataloader_workers import prepare_pass
from lumen.data.fingerprint import is_single_pass
from lumen.data.generators import KeptGenerators
from lumen.data.orders import begin_epoch
from lumen.data.rank_checks import digest_batch
from lumen.data.seeded_dataset import make_early_end_error
from lumen.data.windows import SINGLE_RANK, LoadedBatch, RankSlice
from lumen.errors import DataError
from lumen.internals.loaders import end_persistent_workers, end_workers
from lumen.random import Domain, make_key, seed_generators


@final
class ResumableIterator:
    """Iterator over batches in one process that can resume in the middle of an epoch.

    If the loader has `state_dict` and `load_state_dict`, its state is saved and restored. The same holds for its data
    set if it is loaded in this process. Otherwise a resumed run reads the first batches of the epoch again and drops
    them, which requires equal batch size and workers. The global generators are seeded before every batch, so the main
    process draws the same random numbers after a resume. Random numbers of workers repeat only if batches are read
    again.

    Args:
        loader: The iterable; its `__iter__` restarts an epoch.
        seed: The run's seed, which keys everything random.
        rewinds: True: every pass restarts where the first pass began, for evaluations.
        rank_slice: Rank and number of the processes, if each reads a different part and draws different random numbers.
            (Not before the first batch: its random numbers may decide how the data is divided into parts.)

    Attributes:
        beginning: The state at the beginning of every pass, with `rewinds`.
        batching: The loader's `batch_size`, `num_workers` and `drop_last`; empty for other classes than `DataLoader`.
    """

    def __init__(self, loader: Any, seed: int, *, rewinds: bool, rank_slice: RankSlice = SINGLE_RANK) -> None:
        self._loader, self._source = loader, getattr(loader, "dataset", loader)
        self._seed = seed
        self._rewinds = rewinds
        self._rank_slice = rank_slice
        self._stateful = _find_stateful(loader)
        self._kept_generators = KeptGenerators({"loader": loader}, by_seed=True)
        self._count = SampleCounter(loader)
        self._iterator: Iterator[Any] = iter(())
        self._opened = self._exhausted = self._was_read = False
        self._read = self._samples = self._digest = 0
        self._first_digests: set[int] = set()  # digests of the first batches of repeated passes
        self.batching = (
            {name: getattr(loader, name) for name in _BATCHING_NAMES} if isinstance(loader, DataLoader) else {}
        )
        self._position: dict[str, Any] | None = None  # the loader's present state, if known
        part_of_loader = self._stateful is not None and self._stateful is not loader
        self.beginning = self.get_state() if rewinds and part_of_loader else {"kind": "stream"}

    def iterate_batches(
        self, epoch: int, position: Position, state: dict[str, Any], number: int
    ) -> Iterator[LoadedBatch]:
        """Return the remaining batches of an epoch. The loader's state is restored at once, not at the first `next`.

        Args:
            epoch: Number of the epoch, from 0: with the seed it keys the random numbers.
            position: The consumed part of the epoch, by all processes together.
            state: The result of `get_state` at that position.
            number: Number of batches that this process had read of the epoch at that position.
        """
        may_end_at_once = number or "loader" not in state or (state is self._position and state["exhausted"])
        if not number:
            self.restore_state(state)
        begin_epoch(self._loader, self._kept_generators, self._seed, epoch, position)
        found = not number or self.restore_state(
            state
        )  # after `begin_epoch`, which would reset the restored generators
        self._begin_pass(epoch, position)
        self._read, self._samples, self._digest = number, state["samples"] if number else 0, 0
        if not found:
            self._skip_read_batches(position.get_order_key(epoch), number, state)
        return self._iterate_rest(epoch, position, may_end_at_once=bool(may_end_at_once))

    def _skip_read_batches(self, key: int, number: int, state: dict[str, Any]) -> None:
        """Read the first `number` batches of the epoch again, for a loader without a state.

        Raises:
            DataError: The batches have a different size now, or a different number of samples.
        """
        name, remedy = self._describe_missing_state()
        changed = [f"{option} was {old}, is {self.batching.get(option)}" for option, old in state["cut"].items()
                   if old != self.batching.get(option)]  # fmt: skip
        if changed:
            raise DataError(self._describe_misread(number, f"but the batching has changed: {', '.join(changed)}"))
        _log.warning(
            "%s has no state_dict, so Lumen reads %d batches of this epoch again. To avoid this, %s.",
            name, number, remedy,
        )  # fmt: skip
        samples = 0
        for index in range(number):
            batch = self._read_next(key, index)
            if batch is _END:
                raise DataError(self._describe_misread(number, f"but the epoch now has only {index}"))
            samples += self._count(batch)
            self._add_to_digest(batch, index)
        if samples != state["samples"]:
            held = f"which had {state['samples']} samples, but now have {samples}"
            raise DataError(self._describe_misread(number, held))
        if state.get("sparse_digest", self._digest) != self._digest:
            _log.warning(
                "%s gives different batches when it is read again: the first %d of this epoch differ from the "
"batches that were trained on. Samples are missing or repeated. Draw the order from torch's, "
"numpy's or Python's global generator, which Lumen seeds, or %s.", name, number, remedy,
            )  # fmt: skip

    def _add_to_digest(self, batch: Any, number: int) -> None:
        """Add a batch to the digest that shows if an epoch gives the same batches again.

        The digest covers the first 16 batches and every 16th later one, because a digest costs as much as a small step.
        """
        if self._stateful is None and not self._rewinds and (number < 16 or number % 16 == 0):
            self._digest = digest_batch(batch, self._digest, most=64)

    def _describe_misread(self, number: int, problem: str) -> str:
        name, remedy = self._describe_missing_state()
        return (
            f"this run resumes in the middle of an epoch of {name}, which has no state_dict. Lumen must read the "
            f"first {number} batches again, {problem}. Samples would be missing or repeated. Use the batch_size, the "
            "num_workers and the data of the original run, or resume from a checkpoint at the end of an epoch. Or "
            "start a new run from this run with resume_parts without data, which restarts the epoch. To resume "
            f"anywhere, {remedy}."
        )

    def _describe_missing_state(self) -> tuple[str, str]:
        """Return the class that lacks a state, and the remedy: torchdata's loader needs a stream with a state too."""
        is_stream = bool(self.batching) and isinstance(self._source, IterableDataset)
        owner = self._source if is_stream and not hasattr(self._source, "load_state_dict") else self._loader
        name, steps = type(owner).__name__, list[str]()
        if _has_shuffle_buffer(self._source):
            name = "the shuffle buffer of Hugging Face's datasets"
            return name, "shuffle only shards, or use a map-style data set"
        if owner is self._source or not is_stream:
            steps.append(f"give {name} state_dict and load_state_dict")
        if is_stream and self.batching["num_workers"]:
            steps.append(f"read {type(self._source).__name__} with torchdata's StatefulDataLoader")
        return name, " and ".join(steps)

    def _iterate_rest(self, epoch: int, position: Position, *, may_end_at_once: bool) -> Iterator[LoadedBatch]:
        key = position.get_order_key(epoch)
        batch = self._read_next(key, self._read)
        if batch is _END and not may_end_at_once:
            self._begin_pass(epoch, position)  # The saved position was at the end of the data, so restart.
            batch = self._read_next(key, self._read)
        if batch is _END and self._was_read and self._iterator is self._loader:
            raise self._make_read_before_error()  # Its `__iter__` does not restart.
        if self._rewinds and not self._read and batch is not _END:
            self._warn_of_other_start(batch)
        while batch is not _END:
            samples = self._count(batch)
            self._add_to_digest(batch, self._read)
            self._read += 1
            self._samples += samples
            yield LoadedBatch(batch, samples)
            batch = self._read_next(key, self._read)

    def _warn_of_other_start(self, batch: Any) -> None:
        """Warn once if a pass that should repeat the previous pass begins with a different batch."""
        known = len(self._first_digests)
        self._first_digests.add(digest_batch(batch, most=64))
        if known == 1 < len(self._first_digests):
            _log.warning(
                "%s gives different batches in each pass, though evaluations and overfit_batches repeat the batches of "
                "the first pass. Let its __iter__ begin at the first batch.", type(self._loader).__name__,
            )  # fmt: skip

    def _begin_pass(self, epoch: int, position: Position) -> None:
        rank_words: list[int] = []
        if self.batching and self._loader.persistent_workers:
            end_persistent_workers(self._loader)  # Workers are seeded once, so the epoch would depend on earlier ones.
        if self.batching and self._loader.num_workers and self._rank_slice.rank:
            rank_words = [self._rank_slice.rank, 3]  # Workers of different ranks get different seeds.
        seed_generators(make_key(self._seed, Domain.ORDER, position.get_order_key(epoch), *rank_words))
        with prepare_pass(self._loader):
            self._iterator = iter(self._loader)
        self._was_read = bool(self._exhausted or (self._opened and self._rewinds) or (epoch and not self._opened))
        if self._was_read and is_single_pass(self._loader, self._iterator):
            raise self._make_read_before_error()
        self._opened, self._exhausted = True, False

    def _make_read_before_error(self) -> DataError:
        return DataError(
            f"the loader is a {type(self._loader).__name__}, which can be read only once, and was already read. Use "
            "an object whose __iter__ restarts: a DataLoader, a list, or your own class."
        )

    def _read_next(self, key: int, number: int) -> Any:
        of_all = number * self._rank_slice.world_size + self._rank_slice.rank if number else 0
        seed_generators(make_key(self._seed, Domain.SAMPLE, key, of_all))
        try:
            batch = next(self._iterator, _END)
        except RuntimeError as error:  # A generator converts a StopIteration inside it to this error.
            if "generator raised StopIteration" not in str(error):
                raise
            raise make_early_end_error(self._source, f"after {number} batches of the epoch") from error
        self._exhausted = batch is _END
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the state that `iterate_batches` needs to continue from here: plain data and tensors."""
        state: dict[str, Any] = {"kind": "stream", "read": self._read, "exhausted": self._exhausted}
        state |= {"samples": self._samples, "cut": self.batching}
        if self._stateful is None:
            state["sparse_digest"] = self._digest
        else:  # A copy is needed because the next batch may change the state in place.
            state["loader"] = deepcopy(self._stateful.state_dict())
        return state

    def get_last_state(self) -> dict[str, Any]:
        """Return the state at the end of a pass, from which the next pass begins."""
        state = self.get_state() | {"ended": True}
        if self._exhausted or self._stateful is not self._loader:  # A loader resets its position when it restarts.
            self._position = state
        return state

    def restore_state(self, state: dict[str, Any]) -> bool:
        """Restore a state of the loader. Return True if the loader has `load_state_dict` and its state was saved."""
        if "exhausted" in state:
            self._read, self._samples, self._exhausted = state["read"], state["samples"], state["exhausted"]
        if self._stateful is None or "loader" not in state:
            return False
        if state is not self._position:
            self._stateful.load_state_dict(deepcopy(state["loader"]))
            if self._exhausted:  # At its end torchdata's loader draws a seed; let it draw before the epoch is seeded.
                self._stateful.state_dict()
        self._position = None
        return True

    def explain_empty(self) -> str:
        """Return why a pass had no batches, as text of an error."""
        name, size = type(self._source).__name__, self.batching.get("batch_size")
        if size and self.batching["drop_last"]:
            return f"{name} gave no samples, or fewer than the batch_size {size}, which drop_last=True omits"
        return f"{name} gave no batch"

    def close(self) -> None:
        """End the workers, and restore the loader's own generators, so the user can iterate it again."""
        self._kept_generators.restore_states()
        end_workers(self._iterator)
        self._iterator = iter(())
        if self.batching:
            self._loader._iterator = None


_END = object()
_BATCHING_NAMES = ("batch_size", "num_workers", "drop_last")


def _find_stateful(loader: Any) -> Any:
    """Return the loader or its data set, if it has `load_state_dict`; else None.

    The state of torchdata's loader counts only if the loader's stream has a state. Otherwise torchdata can restore the
    loader's state only once. The state of Hugging Face's streams does not count with a shuffle buffer, because it lacks
    the samples in the buffer.
    """
    stream = loader.dataset if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset) else None
    is_torchdatas = any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)
    if stream is not None and (
        _has_shuffle_buffer(stream) or (is_torchdatas and not hasattr(stream, "load_state_dict"))
    ):
        return None
    candidates = [stream, loader] if stream is not None and loader.num_workers == 0 else [loader]
    return next((part for part in candidates if hasattr(part, "load_state_dict")), None)


def _has_shuffle_buffer(stream: Any) -> bool:
    """Return True for a Hugging Face stream that shuffles samples in a buffer."""
    part = getattr(stream, "_ex_iterable", None)
    while part is not None and "BufferShuffled" not in type(part).__name__:
        part = getattr(part, "ex_iterable", None)
    return part is not None
