"""Lists that report changes, and lists of optimizers or schedulers that are stepped together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_MUTATORS = ("append extend insert remove pop clear sort reverse __setitem__ __delitem__ __iadd__ __imul__").split()


class ObservedList(list[T]):
    """A list that calls `on_change()` after every change.

    Args:
        items: The initial items.
        on_change: A function without arguments.
    """

    def __init__(self, items: Iterable[T] = (), on_change: Callable[[], None] | None = None) -> None:
        super().__init__(items)
        self._on_change = on_change

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy does not report its changes.
        return (type(self), (list(self),))


def _watched(name: str) -> Any:
    plain = getattr(list, name)

    def mutate(self: ObservedList[Any], *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        if self._on_change is not None:
            self._on_change()
        return result

    mutate.__name__ = name
    mutate.__doc__ = plain.__doc__
    return mutate


for _name in _MUTATORS:
    setattr(ObservedList, _name, _watched(_name))


class SteppingList(ObservedList[T]):
    """A list of optimizers or schedulers that are stepped together."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call `step` of every member in order, with the same arguments."""
        for member in self:
            member.step(*args, **kwargs)  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call `zero_grad` of every member in order, with the same arguments."""
        for member in self:
            member.zero_grad(*args, **kwargs)  # type: ignore[attr-defined]
