"""Random generators inside the user's objects: found by search, and seeded by key like the global generators."""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from heapq import heappop, heappush
from itertools import chain, count, islice
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, final

import numpy as np
import torch

from lumen.console import logger as _log
from lumen.random import (
    GENERATORS,
    Domain,
    derive_key,
    get_generator_state,
    hash_name,
    make_key,
    seed_generator,
    seed_generators,
    set_generator_state,
)

#: Limits of the search: objects, functions, items of a collection, items of a collection that may be data.
_OBJECTS, _FUNCTIONS, _ITEMS, _FEW = 8192, 256, 1024, 64
_LEAVES = (
    type(None), str, bytes, bytearray, int, float, complex, range, type, ModuleType, BuiltinFunctionType, CodeType,
    torch.Tensor, torch.device, torch.dtype, np.ndarray, np.generic, np.dtype,
)  # fmt: skip
_GLOBAL = (torch.default_generator, random.seed.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
#: Modules whose objects never contribute to a sample.
_MACHINERY = {"lumen", "threading", "_thread", "multiprocessing", "queue", "logging", "weakref", "asyncio"}
#: Modules whose code reads no generator of the user.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "lumen"}
_WRAPPERS = (staticmethod, classmethod, MethodType)
_CODE = (type, FunctionType, BuiltinFunctionType, type(np.random.get_state.__func__))  # type: ignore[attr-defined]
#: Code with one of these names may draw from a global generator and restore the generator's state afterwards.
_READERS = {
    "get_rng_state", "get_rng_state_all", "get_state", "getstate", "clone_state", "graphsafe_get_state", "initial_seed",
    "fork_rng", "isolate_rng", "default_generator", "get_bit_generator", "mtrand", "fork", "Process", "Pool",
    "ProcessPoolExecutor",
}  # fmt: skip


@final
class KeptGenerators:
    """Random generators found in given objects; each gets its own keys, depending on its place.

    The search follows attributes, slots, collections, variables bound to functions, and global variables that functions
    read. A generator that cannot be seeded causes a warning.

    Args:
        roots: The objects, by name.
        by_seed: True: keys also depend on the user's seed of a generator, if it has one below 2**64 (torch's generators
            and numpy's `Generator`).

    Attributes:
        may_restore: True if the data set has code that may draw from the global generators and restore their states.
    """

    def __init__(self, roots: dict[str, Any], *, by_seed: bool = False) -> None:
        self._roots, self._by_seed = roots, by_seed
        self._keys: dict[str, int] = {}  # by place: the key of the first generator found there
        self._found: list[tuple[int, Any]] = []
        self._saved_states: list[tuple[Any, Any]] = []  # generators with their states when they were found
        self._seeded = self.may_restore = False
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without generators and states: a worker repeats the search."""
        return self.__dict__ | {"_found": [], "_saved_states": [], "_seeded": False}

    @property
    def generators(self) -> list[Any]:
        """Generators found by the last search."""
        return [generator for _, generator in self._found]

    def refresh(self) -> bool:
        """Search again. Return True if there are new generators, or if `may_restore` has changed."""
        known = {id(generator) for generator, _ in self._saved_states}
        could_restore, visited = self.may_restore, dict[int, Any]()
        self._found = []
        for place, generator in walk_objects(self._roots, lambda part: isinstance(part, GENERATORS), _LEAVES):
            if not isinstance(generator, GENERATORS):
                if isinstance(generator, FunctionType) and place.startswith("dataset"):
                    self.may_restore = self.may_restore or _may_restore(generator, visited)
                continue
            is_new = place not in self._keys
            if is_new:
                seed = _get_initial_seed(generator) if self._by_seed else 0
                self._keys[place] = make_key(seed, Domain.KEPT, hash_name(place))
            if id(generator) in known or self._can_be_keyed(place, generator, warn=is_new):
                self._found.append((self._keys[place], generator))
        new_generators = [generator for _, generator in self._found if id(generator) not in known]
        self._saved_states += [(generator, get_generator_state(generator)) for generator in new_generators]
        return bool(new_generators) or self.may_restore != could_restore

    def _can_be_keyed(self, place: str, generator: Any, *, warn: bool) -> bool:
        try:
            state = get_generator_state(generator)
            seed_generator(generator, 0)
            set_generator_state(generator, state)
        except Exception as error:  # A subclass of the user may raise any error.
            if warn:
                _log.warning(
                    "%s is a %s, which cannot be seeded (%s). Its random numbers differ in every run and after a "
"resume. Use a torch.Generator, a numpy.random.Generator or a random.Random.",
                    place, type(generator).__name__, error or type(error).__name__,
                )  # fmt: skip
            return False
        return True

    def seed_from_key(self, key: int) -> None:
        """Seed each generator with its own key, derived from this key."""
        self._seeded = True
        for generator_key, generator in self._found:
            seed_generator(generator, derive_key(key, generator_key))

    @property
    def seed_function(self) -> Callable[[int], None]:
        """Function that seeds these and the global generators; only `seed_generators` if no generator was found."""
        return self._seed_all_from_key if self._found else seed_generators

    def _seed_all_from_key(self, key: int) -> None:
        seed_generators(key)
        self.seed_from_key(key)

    def restore_states(self) -> None:
        """Restore the original states of generators that were seeded here."""
        for generator, state in self._saved_states if self._seeded else ():
            set_generator_state(generator, state)
        self._seeded = False


def _get_initial_seed(generator: Any) -> int:
    """Return the seed that a generator was created with; 0 if it is unknown or was not given."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    seed = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
    entropy = getattr(seed, "entropy", None)
    return entropy if isinstance(entropy, int) and entropy < 1 << 64 else 0  # A seed chosen by numpy has 128 bits.


def walk_objects(
    roots: dict[str, Any], is_end: Callable[[Any], bool], leaves: tuple[type, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield each object that the roots hold and its place: those in the smallest collections first, nearest first.

    The walk follows attributes, slots, collections, the variables that functions are bound to, and the global variables
    that functions of the user read. It ends after 8,192 objects. Objects come earlier if the product of the lengths of
    the collections around them is small, so that many records cannot hide a transform.

    Args:
        roots: The objects where the walk begins, by name.
        is_end: Function that returns True for an object that the walk yields and does not enter.
        leaves: Types of which the walk yields no object.
    """
    order = count()
    waiting: list[Any] = [(1, next(order), "", roots.items())]
    visited: dict[int, Any] = {id(each): each for each in _GLOBAL}  # A reference keeps each id from being used again.
    functions = 0
    while waiting:
        width, _, prefix, contents = heappop(waiting)
        for name, part in contents:
            if (prefix and issubclass(type(part), leaves)) or id(part) in visited:
                continue
            if len(visited) >= _OBJECTS:
                if width <= _FEW:  # Otherwise the remaining objects are in long collections, which hold data.
                    _warn_of_end(", ".join(f"{root} ({type(each).__name__})" for root, each in roots.items()))
                return
            visited[id(part)] = part
            if _is_defined_in(type(part), _MACHINERY) or _is_worker_iterator(part):
                continue
            yield f"{prefix}{name}", part
            if is_end(part):
                continue
            if isinstance(part, FunctionType):
                functions += 1
                inner = (
                    _iterate_function_references(part)
                    if functions <= _FUNCTIONS and not _is_defined_in(part, _LIBRARIES)
                    else ()
                )
            else:
                inner = _iterate_held(part)
                if id(kind := type(part)) not in visited:
                    visited[id(kind)] = kind
                    inner = chain(inner, _iterate_class_attributes(kind))
            heappush(waiting, (width * _count_items(part), next(order), f"{prefix}{name}.", inner))


@cache
def _warn_of_end(names: str) -> None:
    _log.warning(
        "Lumen stops searching %s after %d objects: it neither seeds the random generators that further objects keep, "
        "nor compares their data between ranks. Keep fewer objects there, or draw from the global generators.",
        names, _OBJECTS,
    )  # fmt: skip


def _is_leaf(part: Any) -> bool:
    """Return True for an object without contents, judged by its type, because its own methods may be user code."""
    return issubclass(type(part), _LEAVES)


def _is_defined_in(thing: Any, modules: Iterable[str]) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] in modules


def _is_worker_iterator(part: Any) -> bool:
    """Return True for an iterator of a `DataLoader`, with its workers and queues."""
    kind = type(part)
    return issubclass(kind, Iterator) and kind.__module__.startswith(("torch.utils.data.", "torchdata."))


def _iterate_held(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the contents of an object: items of a collection, attributes, and slots."""
    for collection in (list, tuple, deque):
        if issubclass(type(part), collection):
            yield from _iterate_items(collection.__iter__(part))
    if issubclass(type(part), dict):
        yield from _iterate_items(dict.values(part))
    with suppress(AttributeError):
        yield from list(object.__getattribute__(part, "__dict__").items())
    for slot in _get_slots(type(part)):  # type: ignore[arg-type]
        with suppress(AttributeError):  # The slot is empty.
            yield slot.__name__, slot.__get__(part)


def _count_items(part: Any) -> int:
    """Return the number of items of a collection; 1 for any other object."""
    kinds = (kind for kind in (list, tuple, deque, dict) if issubclass(type(part), kind))
    return max(1, next((kind.__len__(part) for kind in kinds), 1))


@lru_cache(maxsize=256)
def _get_slots(kind: type) -> list[MemberDescriptorType]:
    return [each for above in kind.__mro__ for each in vars(above).values() if isinstance(each, MemberDescriptorType)]


def _iterate_items(values: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the numbered items of a collection; no items of a long one whose first item looks like data."""
    items = list(islice(values, _ITEMS))
    if len(items) <= _FEW or not _is_leaf(items[0]):
        yield from enumerate(items)


def _iterate_class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    for each in kind.__mro__:
        if not _is_defined_in(each, _LIBRARIES):
            yield from list(vars(each).items())


def _iterate_function_references(function: FunctionType) -> Iterator[tuple[Any, Any]]:
    """Yield the variables bound to a function, and the global variables that it reads."""
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # The cell is still empty.
            yield name, cell.cell_contents
    for name in sorted(_find_global_names(function.__code__, function.__globals__)):
        yield name, function.__globals__[name]


def _find_global_names(code: CodeType, values: dict[str, Any]) -> set[str]:
    names = {name for name in code.co_names if name in values and not _is_leaf(values[name])}
    if names:  # Some names are names of attributes.
        names &= {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return names.union(*(_find_global_names(each, values) for each in inner))


def _may_restore(function: FunctionType, visited: dict[int, Any]) -> bool:
    """Return True if a function uses one of `_READERS`, also indirectly through functions or classes of the user.

    Args:
        function: The function to inspect.
        visited: Objects inspected before, by id.
    """
    waiting: list[Any] = [function]
    while waiting:
        part = waiting.pop()
        part = part.fget if isinstance(part, property) else part.__func__ if isinstance(part, _WRAPPERS) else part
        if id(part) in visited or not isinstance(part, _CODE):
            continue
        visited[id(part)] = part
        is_users = not _is_installed(part.__module__ or "")
        if part.__name__ in _READERS:  # The code may use an alias of the function.
            return True
        if isinstance(part, type) and is_users:
            waiting += vars(part).values()
        if not isinstance(part, FunctionType) or _is_defined_in(part, _LIBRARIES):
            continue
        if (names := _find_names(part.__code__)) & _READERS:
            return True
        if is_users:
            named = [part.__globals__.get(name, sys.modules.get(name)) for name in names]
            modules = [vars(each) for each in named if type(each) is ModuleType and not _is_installed(each.__name__)]
            waiting += [*named, *(module[name] for module in modules for name in names & module.keys())]
    return False


def _find_names(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_find_names(each) for each in code.co_consts if isinstance(each, CodeType)))


@cache
def _is_installed(module: str) -> bool:
    """Return True for the modules of Python, torch, numpy and Lumen, and those of installed packages."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in _LIBRARIES or "-packages" in file
