"""The passes of MosaicML's Composer."""

from __future__ import annotations

from typing import Any

import pytest

from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import ADDS_NORMS, PRUNES_BATCH, Algorithm, Event, Placement
from composer.core.passes import (
    sort_low_precision_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)


class Plain(Algorithm):
    def __init__(self, **placement: Any) -> None:
        self.placement = Placement(**placement)

    def match(self, event: Event, state: Any) -> bool:
        return True

    def apply(self, event: Event, state: Any, logger: Any) -> None: ...


def test_the_sorting_helpers_are_stable() -> None:
    assert sort_to_back([1, "a", "c", 2, 3.0], int) == ["a", "c", 3.0, 1, 2]
    assert sort_to_front([1, "a", "c", 2, 3.0], int) == [1, 2, "a", "c", 3.0]


def test_algorithms_move_by_their_placement() -> None:
    plain, pruner, norms = Plain(), Plain(provides={PRUNES_BATCH}), Plain(after={ADDS_NORMS})

    assert [pruner, plain] == sort_selective_backprop_first([plain, pruner], Event.INIT)
    assert [plain, norms] == sort_low_precision_layernorm_last([norms, plain], Event.INIT)


def test_two_interpolated_losses_are_warned_of_by_attribute() -> None:
    first, second = Plain(), Plain()
    first.interpolate_loss = True  # type: ignore[attr-defined]
    assert [first, second] == warn_if_multiple_loss_interpolation([first, second], Event.BEFORE_LOSS)

    second.interpolate_loss = True  # type: ignore[attr-defined]
    with pytest.warns(NotIntendedUseWarning, match="`Plain` and `Plain` all interpolate the loss"):
        warn_if_multiple_loss_interpolation([first, second], Event.BEFORE_LOSS)
