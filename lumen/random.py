"""Random numbers by key, without state: equal keys give equal draws on any rank, worker or resumed process.

A key is a 64-bit hash of (seed, domain, words...). On the CPU, torch and numpy both use a Mersenne Twister seeded with
32 bits, and equal seeds would give equal numbers. Each therefore gets a different half of the key. The hash function is
SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
import torch

from lumen.console import logger as _log
from lumen.errors import ConfigError

_MASK_64, _MASK_32 = (1 << 64) - 1, (1 << 32) - 1
_HAS_MPS = torch.backends.mps.is_available()
_HAS_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_python_generator: Any = random.seed.__self__  # type: ignore[attr-defined]  # behind the functions of `random`
_numpy_generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # behind `np.random`
_seed_torch, _seed_numpy = torch.default_generator.manual_seed, np.random.seed
_seed_python = super(random.Random, _python_generator).seed  # `random.seed` for ints, without its type checks


class Domain(IntEnum):
    """Purpose of a key: equal numbers in two domains give unrelated keys."""

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


#: Domains of the evaluations by stage.
EVALUATIONS = {
    "validate": Domain.VALIDATE,
    "sanity": Domain.SANITY,
    "test": Domain.TEST,
    "predict": Domain.PREDICT,
}


def _scramble_word(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return word ^ (word >> 31)


@lru_cache(maxsize=64)
def _mix_words(seed: int, *words: int) -> int:
    """Hash all words of a key but the last; cached, because only the last word changes from sample to sample."""
    if not 0 <= seed <= _MASK_64:
        raise ConfigError(f"seed: expected an integer from 0 to 2**64 - 1, found {seed!r}.")
    state = _scramble_word(seed)
    for word in words:
        state = _scramble_word(state ^ word)
    return state


def make_key(seed: int, domain: Domain, *words: int) -> int:
    """Hash a seed (0 to 2**64 - 1), a domain and any number of non-negative integers to a 64-bit key."""
    state = _mix_words(seed, domain, *words[:-1])
    if words:
        state = _scramble_word(state ^ words[-1])
    return state ^ (state >> 32)


def derive_key(key: int, word: int) -> int:
    """Return a new 64-bit key made of a key and a 64-bit word."""
    return _scramble_word(_scramble_word(key) ^ word)


def hash_name(name: str) -> int:
    """Return a 64-bit hash of a name, equal in every process, for use as a word of a key."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def seed_generators(key: int) -> None:
    """Seed the global generators of torch (CPU and the accelerators in use), numpy and `random` with a 64-bit key.

    Torch on the CPU gets one half of the key and numpy the other half. The other generators use different algorithms
    and get the whole key. The call takes a few microseconds: `torch.manual_seed` would take up to 250, because it also
    visits unused devices.
    """
    global _seeded
    _seed_torch(key & _MASK_32)
    _seed_numpy(key >> 32)
    _seed_python(key)
    _python_generator.gauss_next = None
    if _memories is not None:
        torch_memory, numpy_memory, python_memory = _memories
        _seeded = SeededState(torch_memory.raw, numpy_memory.raw, python_memory.raw, key)
    if _HAS_CUDA and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(key)
    elif _HAS_MPS:
        torch.mps.manual_seed(key)


class SeededState(NamedTuple):
    """State of the global generators after Lumen has seeded them.

    Attributes:
        torch: Memory of torch's generator on the CPU.
        numpy: Memory of numpy's generator.
        python: Memory of Python's generator.
        key: Seed of the generators of devices.
    """

    torch: bytes
    numpy: bytes
    python: bytes
    key: int

    def is_unchanged(self) -> bool:
        """Return True if no global generator has drawn or been seeded since then."""
        return _seeded is self and _memories[0].raw == self.torch and self.is_unchanged_except_torch()

    def is_unchanged_except_torch(self) -> bool:
        """Return True if no global generator except torch's on the CPU has drawn or been seeded since then."""
        return (
            _memories[1].raw == self.numpy
            and _memories[2].raw == self.python
            and np.random.get_bit_generator() is _numpy_generator  # type: ignore[attr-defined]
            and not _HAS_MPS
            and not (_HAS_CUDA and torch.cuda.is_initialized() and self._have_device_generators_moved())  # type: ignore[no-untyped-call]
        )

    def _have_device_generators_moved(self) -> bool:
        # The offset is 0 before the first draw. Reading both numbers is faster than `get_state`, which makes a tensor.
        return any(each.initial_seed() != self.key or each.get_offset() for each in torch.cuda.default_generators)


_seeded = SeededState(b"", b"", b"", 0)
_memories: Any = None


def watch_generators(memories: tuple[Any, Any, Any]) -> None:
    """Detect draws from global generators, from the next seed on, in the memory of torch's, numpy's and Python's."""
    global _memories
    _memories = memories


def seed_unless_unused(seed: int, domain: Domain, *words: int) -> SeededState:
    """Seed the global generators, if anything has drawn from them since Lumen last seeded them.

    Args:
        seed: The seed of the key, as in `make_key`.
        domain: The purpose of the key.
        words: Any number of non-negative integers.

    Returns:
        The state of the generators, which have not drawn yet.
    """
    global _seeded
    if not _seeded.is_unchanged_except_torch():
        seed_generators(make_key(seed, domain, *words))
    elif _memories[0].raw != _seeded.torch:  # In most steps only torch draws.
        _seed_torch(make_key(seed, domain, *words) & _MASK_32)
        _seeded = _seeded._replace(torch=_memories[0].raw)
    return _seeded


#: Classes of generators that objects of the user may hold.
GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)


@final
class GeneratorStates:
    """States of all global generators, and of other given generators, at the time of creation.

    Args:
        generators: The other generators, of the classes in `GENERATORS`.
    """

    def __init__(self, generators: Sequence[Any] = ()) -> None:
        self._cpu, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()
        is_cuda_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = [generator.get_state() for generator in torch.cuda.default_generators] if is_cuda_used else []
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        self._other_states = [(generator, get_generator_state(generator)) for generator in generators]

    def restore(self) -> None:
        """Restore the states at the time of creation."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        for generator, state in zip(torch.cuda.default_generators, self._cuda, strict=False):
            generator.set_state(state)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        for generator, state in self._other_states:
            set_generator_state(generator, state)


def _get_bit_generator(generator: Any) -> Any:
    """Return the bit generator of a numpy `Generator`; any other generator unchanged."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def get_generator_state(generator: Any) -> Any:
    """Return the state of a generator of the classes in `GENERATORS`."""
    if isinstance(bit_generator := _get_bit_generator(generator), np.random.BitGenerator):
        return bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a state that `get_generator_state` returned."""
    if isinstance(bit_generator := _get_bit_generator(generator), np.random.BitGenerator):
        bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def seed_generator(generator: Any, key: int) -> None:
    """Seed a generator of the classes in `GENERATORS` with a 64-bit key."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key)
    elif isinstance(bit_generator := _get_bit_generator(generator), np.random.BitGenerator):
        bit_generator.state = type(bit_generator)(key).state
    else:
        generator.seed(key >> 32 if isinstance(generator, np.random.RandomState) else key)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Return a context that restores the global generators when it exits."""
    before = GeneratorStates()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Return a context that restores the global generators of torch, its devices, numpy and `random` when it exits.

    Args:
        include_cuda: Accepted for compatibility with Lightning: the generators of the devices in use are always
            restored.
    """
    with preserve_generators():
        yield


_chosen_seed: int | None = None  # set by `seed_everything`, for the runs of this process


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Set the seed of the runs of this process, and seed the global generators for building a model.

    A run reads this seed when it begins, even if its trainer was created earlier; several runs get the same seed.
    `Trainer(seed=...)` takes precedence, and a resumed run keeps its seed. With several processes, each process calls
    this, and rank 0's seed counts.

    Args:
        seed: An integer from 0 to 2**63 - 1. None: 0, with a warning.
        workers: Accepted for compatibility with Lightning: the draws of workers are always keyed by the run's seed.
        verbose: Log the seed.

    Returns:
        The seed as an int; 0 if no seed was given.

    Raises:
        ConfigError: `seed` is not an integer from 0 to 2**63 - 1.
    """
    global _chosen_seed
    if seed is None:
        seed = 0
        if verbose:
            _log.warning("seed_everything: no seed was given, so the seed is 0")
    elif verbose:
        _log.info("the seed is %s", seed)
    _chosen_seed = check_seed("seed_everything", seed)
    seed_for_building(_chosen_seed)
    return _chosen_seed


def get_chosen_seed() -> int | None:
    """Return the seed of the last call of `seed_everything` in this process, or None."""
    return _chosen_seed


def draw_seed() -> int:
    """Draw a seed for a run from torch's global generator: a script that seeds torch gets the same runs every time."""
    return int(torch.randint(2**31, (), generator=torch.default_generator, device="cpu"))


def seed_for_building(seed: int) -> None:
    """Seed the global generators for building a model and its data."""
    seed_generators(make_key(seed, Domain.INIT))


def check_seed(name: str, seed: Any) -> int:
    """Return a run's seed as an `int`.

    Args:
        name: Name of the argument or setting, for the message.
        seed: An integer of any type, including those of numpy.

    Raises:
        ConfigError: `seed` is not an integer from 0 to 2**63 - 1.
    """
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= seed < 2**63:
        return int(seed)
    raise ConfigError(f"{name}: a seed is an integer from 0 to 2**63 - 1, found {seed!r}.")
