"""Randomness is keyed, never state: the same key gives the same draws on any rank, worker or resumed process.

A key is a 64-bit mix of (seed, domain, words...). The generators get different parts of it: on the CPU torch and numpy
both are a Mersenne Twister seeded by 32 bits, and would draw the same numbers from the same ones. The mixing function
is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
import torch

from lumen.console import logger as _log
from lumen.errors import ConfigError

_MASK, _LOW = (1 << 64) - 1, (1 << 32) - 1
_HAS_MPS = torch.backends.mps.is_available()
_HAS_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # the generator behind the functions of `random`
_numpy: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # the one behind the functions of numpy
_seed_torch, _seed_numpy = torch.default_generator.manual_seed, np.random.seed
_seed_python = super(random.Random, _python).seed  # of an int: what `random.seed` comes to after looking at its type


class Domain(IntEnum):
    """What a key is used for: equal numbers in two domains give unrelated keys."""

    INIT = 1
    ORDER = 2
    SAMPLE = 3
    COLLATE = 4
    TRAIN = 5
    VALIDATE = 6
    TEST = 7
    PREDICT = 8
    HOOK = 9
    SANITY = 10
    LOADER = 11
    KEPT = 12


#: What an evaluation draws; its stage is also what tells its loaders from those of training.
EVALUATIONS = {
    "validate": Domain.VALIDATE,
    "sanity": Domain.SANITY,
    "test": Domain.TEST,
    "predict": Domain.PREDICT,
}


def _scramble(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


@lru_cache(maxsize=64)
def _mixed(seed: int, *words: int) -> int:
    """The mix of all words of a key but the last; cached, because only the last changes from sample to sample."""
    if not 0 <= seed <= _MASK:
        raise ConfigError(f"a key is made of a seed from 0 to 2**64 - 1, found {seed!r}.")
    state = _scramble(seed)
    for word in words:
        state = _scramble(state ^ word)
    return state


def make_key(seed: int, domain: Domain, *words: int) -> int:
    """Mix a seed (0 to 2**64 - 1), a domain and any number of non-negative integers into a 64-bit key."""
    state = _mixed(seed, domain, *words[:-1])
    if words:
        state = _scramble(state ^ words[-1])
    return state ^ (state >> 32)


def derived_key(key: int, word: int) -> int:
    """A new 64-bit key from a key and a 64-bit word."""
    return _scramble(_scramble(key) ^ word)


def number_of(name: str) -> int:
    """A 64-bit hash of a name, equal in every process, to be used as a word of a key."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def seed_generators(key: int) -> None:
    """Set the global generators of torch (CPU and the accelerators in use), numpy and `random` to a 64-bit key.

    Each draws numbers of its own: torch on the CPU is seeded by one half of the key, numpy by the other, the others,
    whose algorithms are different ones, by all of it. Costs a few microseconds: `torch.manual_seed` would take up to
    250, because it also visits devices not in use.
    """
    global _seeded
    _seed_torch(key & _LOW)
    _seed_numpy(key >> 32)
    _seed_python(key)
    _python.gauss_next = None
    if _memories is not None:
        in_torch, in_numpy, in_python = _memories
        _seeded = Seeded(in_torch.raw, in_numpy.raw, in_python.raw, key)
    if _HAS_CUDA and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(key)
    elif _HAS_MPS:
        torch.mps.manual_seed(key)


class Seeded(NamedTuple):
    """The state of the global generators after Lumen has seeded them.

    Attributes:
        torch: What is read of torch's generator on the CPU.
        numpy: What is read of numpy's.
        python: What is read of Python's.
        key: Seed of the generators of devices.
    """

    torch: bytes
    numpy: bytes
    python: bytes
    key: int

    def is_left(self) -> bool:
        """Return True if since then no global generator has drawn, and nobody has seeded one."""
        return _seeded is self and _memories[0].raw == self.torch and self.is_left_but_for_torch()

    def is_left_but_for_torch(self) -> bool:
        """Return True if only torch's generator on the CPU may have drawn, or been seeded."""
        return (
            _memories[1].raw == self.numpy
            and _memories[2].raw == self.python
            and np.random.get_bit_generator() is _numpy  # type: ignore[attr-defined]
            and not _HAS_MPS
            and not (_HAS_CUDA and torch.cuda.is_initialized() and self._have_devices_moved())  # type: ignore[no-untyped-call]
        )

    def _have_devices_moved(self) -> bool:
        unused = struct.pack("=QQ", self.key, 0)  # the seed, and how far it has drawn
        return any(each.get_state().numpy().tobytes() != unused for each in torch.cuda.default_generators)


_seeded = Seeded(b"", b"", b"", 0)
_memories: Any = None


def watch_generators(memories: tuple[Any, Any, Any]) -> None:
    """From the next seed on, look whether global generators draw, by the memory of torch's, numpy's and Python's."""
    global _memories
    _memories = memories


def unused_generators(seed: int, domain: Domain, *words: int) -> Seeded:
    """Set the global generators to a key, but for those that nobody has used since Lumen seeded them.

    Args:
        seed: See `make_key`, as for the others.
        domain: What the key is used for.
        words: Any number of non-negative integers.

    Returns:
        Their state, from which nothing was drawn yet.
    """
    global _seeded
    if not _seeded.is_left_but_for_torch():
        seed_generators(make_key(seed, domain, *words))
    elif _memories[0].raw != _seeded.torch:  # In most steps torch alone draws.
        _seed_torch(make_key(seed, domain, *words) & _LOW)
        _seeded = _seeded._replace(torch=_memories[0].raw)
    return _seeded


#: The classes of generators that a user's object may keep.
GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)


@final
class GeneratorStates:
    """The states of all global generators, and of some others, at the moment when it is created.

    Args:
        others: More generators, of the classes in `GENERATORS`.
    """

    def __init__(self, others: Sequence[Any] = ()) -> None:
        self._cpu, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = [generator.get_state() for generator in torch.cuda.default_generators] if in_use else []
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        self._others = [(generator, state_of(generator)) for generator in others]

    def restore(self) -> None:
        """Set all of them back to the states they had when this was created."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        for generator, state in zip(torch.cuda.default_generators, self._cuda, strict=False):
            generator.set_state(state)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        for generator, state in self._others:
            set_state(generator, state)


def _bits_of(generator: Any) -> Any:
    """The bit generator of a numpy `Generator`; any other generator as it is."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def state_of(generator: Any) -> Any:
    """The state of a generator of one of the classes in `GENERATORS`."""
    if isinstance(bits := _bits_of(generator), np.random.BitGenerator):
        return bits.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Restore a state that `state_of` returned."""
    if isinstance(bits := _bits_of(generator), np.random.BitGenerator):
        bits.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def seed_generator(generator: Any, key: int) -> None:
    """Seed a generator of one of the classes in `GENERATORS` by a 64-bit key."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key)
    elif isinstance(bits := _bits_of(generator), np.random.BitGenerator):
        bits.state = type(bits)(key).state
    else:
        generator.seed(key >> 32 if isinstance(generator, np.random.RandomState) else key)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """The context after which the global generators are as before, whatever was drawn in it."""
    before = GeneratorStates()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """The context after which the global generators of torch, its devices, numpy and `random` are as before.

    Args:
        include_cuda: Accepted for users of Lightning: those of the devices in use are always put back too.
    """
    with preserved_generators():
        yield


_chosen: int | None = None  # by `seed_everything`, for the runs of this process


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Choose the seed of the runs of this process, and seed the global generators for building a model.

    A run takes it when it begins, whenever its trainer was built, and two runs take the same; `Trainer(seed=...)` goes
    before it, and a run that is resumed keeps the seed it had. With several processes each calls this, and rank 0's
    counts.

    Args:
        seed: 0 to 2**63 - 1. None: 0, with a warning.
        workers: Accepted for users of Lightning; what workers draw is always keyed by the run's seed.
        verbose: Log the seed when it is set.

    Returns:
        The seed as an int; 0 if none was given.

    Raises:
        ConfigError: `seed` is no integer from 0 to 2**63 - 1.
    """
    global _chosen
    if seed is None:
        seed = 0
        if verbose:
            _log.warning("seed_everything was given no seed: it is 0")
    elif verbose:
        _log.info("the seed is %s", seed)
    _chosen = checked_seed("seed_everything", seed)
    seed_for_building(_chosen)
    return _chosen


def chosen_seed() -> int | None:
    """The seed that `seed_everything` was given last in this process."""
    return _chosen


def draw_seed() -> int:
    """Draw a seed for a run from torch's global generator: a script that seeds torch gets the same runs every time."""
    return int(torch.randint(2**31, (), generator=torch.default_generator, device="cpu"))


def seed_for_building(seed: int) -> None:
    """Seed the global generators for building a model and its data."""
    seed_generators(make_key(seed, Domain.INIT))


def checked_seed(name: str, seed: Any) -> int:
    """A run's seed as an `int`.

    Args:
        name: The argument or setting it was given as, for the message.
        seed: An integer of any type, numpy's included.

    Raises:
        ConfigError: `seed` is no integer from 0 to 2**63 - 1.
    """
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= seed < 2**63:
        return int(seed)
    raise ConfigError(f"{name}: a seed is an integer from 0 to 2**63 - 1, found {seed!r}.")
