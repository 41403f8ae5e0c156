"""Public names that changed. The old name is an error that gives the new name, for one version."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lumen.errors import ConfigError


class RenamedMembers:
    """Base of public classes with members that changed their names in this version."""

    _renamed: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, renamed: Mapping[str, str] | None = None, **others: Any) -> None:
        """Refuse a subclass that defines an old name, because Lumen would never read it.

        Args:
            renamed: New names by old names, of this class and its subclasses; None for the names of the base class.
            others: Arguments for the other base classes of a subclass.

        Raises:
            ConfigError: The class defines an old name.
        """
        super().__init_subclass__(**others)
        if renamed is not None:
            cls._renamed = renamed
        for old, new in cls._renamed.items():
            if old in vars(cls):
                raise ConfigError(f"{cls.__qualname__} defines {old}, which is now called {new}. Rename it to {new}.")

    if not TYPE_CHECKING:  # a type checker would otherwise accept every name

        def __getattr__(self, name: str) -> Any:
            if new := self._renamed.get(name):
                raise AttributeError(f"{type(self).__name__} has no attribute {name}: it is now called {new}.")
            if hasattr(super(), "__getattr__"):  # a class may also have advice for names of Lightning
                return super().__getattr__(name)
            return object.__getattribute__(self, name)  # raises the usual error, or again that of a property
