"""An old public name is an error that gives the new name."""

import copy
import pickle
from typing import ClassVar

import pytest

import lumen
from lumen.errors import ConfigError
from lumen.errors.renamed import RenamedMembers
from lumen.precision import BFloat16
from lumen.strategies import SingleDevice

OWNERS = {"callback": lumen.Callback, "strategy": SingleDevice, "precision": BFloat16}
RENAMED = [(owner, old, new) for owner, cls in OWNERS.items() for old, new in cls._renamed.items()]


class WithFault(lumen.Callback):
    @property
    def path(self):
        return self.folder_that_nobody_set


@pytest.mark.parametrize(("owner", "old", "new"), RENAMED)
def test_a_subclass_with_an_old_name_raises(owner, old, new):
    with pytest.raises(ConfigError, match=f"Mine defines {old}, which is now called {new}. Rename it to {new}."):
        type("Mine", (OWNERS[owner],), {old: lambda self: None})
    assert hasattr(type("Mine", (OWNERS[owner],), {new: None}), new)


@pytest.mark.parametrize(("owner", "old", "new"), RENAMED)
def test_reading_an_old_name_gives_the_new(owner, old, new):
    with pytest.raises(AttributeError, match=f"has no attribute {old}: it is now called {new}."):
        getattr(OWNERS[owner](), old)
    assert hasattr(OWNERS[owner], new)


def test_trainer_gives_the_new_name_too():
    with pytest.raises(AttributeError, match=r"request_agreement\. Call trainer.request_stop_vote"):
        lumen.Trainer().request_agreement()


def test_other_missing_names_raise_as_in_python():
    with pytest.raises(AttributeError, match="'EMA' object has no attribute 'decays'"):
        _ = lumen.EMA(decay=0.9).decays
    with pytest.raises(AttributeError, match="no attribute 'folder_that_nobody_set'"):  # not: no attribute 'path'
        _ = WithFault().path
    for copied in (copy.deepcopy(lumen.EMA(decay=0.9)), pickle.loads(pickle.dumps(lumen.EMA(decay=0.9)))):
        assert copied.decay == 0.9
    assert issubclass(lumen.Callback, RenamedMembers)


class Registry:
    keys: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key, **others):
        super().__init_subclass__(**others)
        cls.keys.append(key)


def test_other_base_classes_get_their_arguments():
    class Registered(lumen.Callback, Registry, key="mine"):
        pass

    assert Registered.keys == ["mine"]
    with pytest.raises(TypeError, match="keyword argument"):
        type("Mine", (lumen.Callback,), {}, colour="red")
