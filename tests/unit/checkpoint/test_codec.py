"""Codec: plain data as JSON and back, exactly, or refused by name."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from lumen.checkpoint.format.codec import decode, encode
from lumen.errors import CheckpointDamaged, CheckpointError
from tests.helpers.checkpoints import is_same_tensor


def round_trip(value):
    tensors = {}
    return decode(json.loads(json.dumps(encode(value, tensors, "value"), allow_nan=False)), tensors)


SIGNALLING_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF0000000000123))[0]
LEAVES = [
    *(None, True, False, 0, -1, 2**63, -(2**200), 10**5000, 0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308),
    *(math.nan, -math.nan, SIGNALLING_NAN, math.inf, -math.inf, "", "ü\0\ud800", "$tuple", b"", b"\x00\xff"),
    *(Path("a/b"), Path("/"), torch.bfloat16, torch.device("cuda:3"), torch.device("cpu"), torch.Size([2, 0])),
    *((), [], {}, set(), frozenset()),
]


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: repr(value)[:20] if value != 10**5000 else "huge")
def test_every_plain_value_survives_exactly(value):
    assert is_same_tensor(round_trip(value), value)


def random_value(rng, depth):
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(LEAVES)
    hashable = [1, 2.5, "a", "$a", None, True, (1, ("b", -0.0)), -7, "a.b", b"x"]
    items = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    match rng.randrange(6):
        case 0:
            return items
        case 1:
            return tuple(items)
        case 2:
            return set(rng.sample(hashable, 3))
        case 3:
            return {rng.choice(["$tuple", "$dict", "plain", ""]): item for item in items}
        case 4:
            return dict(zip(rng.sample(hashable[:-1], len(items)), items, strict=True))
        case _:
            return rng.choice([torch.randn(2, 1), np.arange(3, dtype=np.uint16), torch.tensor(1, dtype=torch.int8)])


def test_random_nested_data_survives_exactly():
    rng = random.Random(0)
    for _ in range(500):
        value = random_value(rng, 5)
        assert is_same_tensor(round_trip(value), value), value


def test_other_scalars_and_dictionaries_become_plain():
    """NumPy scalars and subclasses of dict, as OrderedDict and Counter."""
    value = [np.int64(-3), np.bool_(True), np.str_("x"), np.bytes_(b"y"), np.float64("inf")]
    assert is_same_tensor(round_trip(value), [-3, True, "x", b"y", math.inf])
    ordered, default, counter = OrderedDict(b=1, a=2), defaultdict(list, {3: [4]}), Counter("aab")
    assert is_same_tensor(round_trip([ordered, default, counter]), [{"b": 1, "a": 2}, {3: [4]}, {"a": 2, "b": 1}])
    assert is_same_tensor(round_trip({np.int64(4): 1}), {4: 1})


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "f2", "f4"])
def test_numpy_scalars_keep_their_dtype(dtype):
    for number in (3, 0.1, *((math.nan, -math.inf) if dtype[0] == "f" else ())):
        value = np.dtype(dtype).type(number)
        (found,) = round_trip([value])
        assert type(found) is type(value)
        assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i8", "f2", "f4", "f8", "c8", "c16"])
def test_arrays_of_any_strides_survive(dtype):
    array = np.arange(24).reshape(4, 6).astype(dtype)
    views = [array, array.T, array[::-1, ::2], np.broadcast_to(array[0], (3, 6)), array[2, 3:4].reshape(()), array[:0]]
    assert is_same_tensor(round_trip(views), views)


def test_tensors_with_one_path_are_kept_apart():
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "b'": torch.tensor(3)}}
    assert is_same_tensor(round_trip(value), value)


class Colour(IntEnum):
    RED = 1


class Text(str):
    pass


REFUSED = {
    "lambda": lambda: None,
    "module": torch.nn.Linear(1, 1),
    "enum": Colour.RED,
    "subclass": Text("x"),
    "complex": 1j,
    "type": int,
    "long double": np.longdouble(1),
    "date": np.datetime64("2020-01-01T00", "ns"),
    "duration": np.timedelta64(1, "ns"),
    "object array": np.array([None]),
    "text array": np.array(["a"]),
    "swapped array": np.array([1.0]).astype(">f8"),
    "masked array": np.ma.masked_array([1], [True]),
    "tensor as key": {(torch.tensor(1),): 1},
    "bytes as key": {b"x": 1},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_values_raise_with_their_path(kind):
    with pytest.raises(
        CheckpointError, match=r"callbacks\.Mine\.items\[1\].*(cannot be saved|be part of a key)"
    ) as error:
        encode({"Mine": {"items": [0, REFUSED[kind]]}}, {}, "callbacks")
    assert len(str(error.value)) < 300


def test_a_cycle_and_endless_nesting_are_errors():
    cycle = {"a": []}
    cycle["a"].append((cycle,))
    with pytest.raises(CheckpointError, match=r"x\.a\[0\]\[0\]: this dict contains itself"):
        encode(cycle, {}, "x")
    deep = []
    for _ in range(101):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
        encode(deep, {}, "x")
    assert is_same_tensor(round_trip(deep[0]), deep[0])
    shared = [1]
    assert is_same_tensor(round_trip([shared, shared]), [[1], [1]])


MALFORMED = [
    *({"$tuple": 5}, {"$tuple": []} | {"b": 1}, {"$unknown": 1}, {"$int": 5}, {"$int": "z"}, {"$float": "00"}),
    *({"$bytes": "?"}, {"$path": 3}, {"$dtype": "load"}, {"$dtype": []}, {"$device": "nowhere"}, {"$size": ["a"]}),
    *({"$size": [[]]}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$tensor": "gone"}, {"$array": []}, {"$set": [[]]}),
    *({"$scalar": ["object_", 1]}, {"$scalar": ["int8", 300]}, {"$scalar": 1}),
]


@pytest.mark.parametrize("value", MALFORMED, ids=str)
def test_malformed_data_is_reported_as_damage(value):
    with pytest.raises(CheckpointDamaged, match="cannot be decoded"):
        decode([value], {})
