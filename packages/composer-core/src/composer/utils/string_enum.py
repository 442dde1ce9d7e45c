"""An enum whose members are looked up by name or value, case-insensitively."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any


class StringEnum(Enum):
    """An enum with upper-case names and lower-case string values, looked up case-insensitively.

    `Cls(x)` accepts a member, a name or a value.

    Raises:
        ValueError: At class creation, a name is not upper-case or a value is not lower-case; on look-up, no member
            matches.
        TypeError: On look-up, neither a member nor a string is given.

    Example:
        >>> class Mode(StringEnum):
        ...     FAST = "fast"
        >>> Mode("Fast") is Mode.FAST
        True
    """

    # For speed: members are singletons, and the hash of `Enum` is a Python function.
    __hash__ = object.__hash__

    def __init__(self, *args: Any) -> None:
        if self._name_.upper() != self._name_:
            raise ValueError(f"The name of a `StringEnum` member must be upper-case, got {self._name_!r}.")
        if not isinstance(self._value_, str) or self._value_.lower() != self._value_:
            raise ValueError(f"The value of a `StringEnum` member must be a lower-case string, got {self._value_!r}.")

    def __eq__(self, other: object) -> bool:
        if other is self or other.__class__ is self.__class__:  # fast path: algorithms compare events at every event
            return other is self
        if isinstance(other, str):
            warnings.warn(
                f"Comparing {type(self).__name__}.{self.name} with the string {other!r}. "
                f"Convert it first: `{type(self).__name__}({other!r})`.",
                stacklevel=2,
            )
            try:
                other = type(self)(other)
            except ValueError:
                return NotImplemented
        return super().__eq__(other)

    @classmethod
    def _missing_(cls, value: object) -> StringEnum:
        if not isinstance(value, str):
            raise TypeError(f"A `{cls.__name__}` must be looked up by a string, got {value!r}.")
        member = cls.__members__.get(value.upper())
        if member is None:
            member = next((m for m in cls if m.value == value.lower()), None)
        if member is None:
            known = ", ".join(repr(m.value) for m in cls)
            raise ValueError(f"`{cls.__name__}` must be one of {known}, got {value!r}.")
        return member
