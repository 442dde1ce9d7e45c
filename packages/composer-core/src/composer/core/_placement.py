"""What an algorithm does to a run, and where that puts it among others: by effect, never by class.

An algorithm says what it provides and next to which effects it must stand. Packages thus order themselves without
knowing each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

__all__ = [
    "ADDS_CONVS",
    "ADDS_NORMS",
    "AVERAGES_WEIGHTS",
    "CHANGES_LENGTH",
    "CHANGES_MEMORY_FORMAT",
    "CHANGES_RESOLUTION",
    "CLIPS_GRADIENTS",
    "EFFECTS",
    "FREEZES_WEIGHTS",
    "INTERPOLATES_LOSS",
    "MIXES_TARGETS",
    "PHRASES",
    "PRUNES_BATCH",
    "REPLACES_CONVS",
    "REPLACES_MODEL",
    "REPLACES_NORMS",
    "SMOOTHS_TARGETS",
    "TRANSFORMS_BATCH",
    "WRAPS_OPTIMIZER",
    "Placement",
]

PRUNES_BATCH = "prunes_batch"  # drops examples, judged on clean inputs
TRANSFORMS_BATCH = "transforms_batch"  # changes inputs or targets of the batch
CHANGES_RESOLUTION = "changes_resolution"  # changes the height and width of images
CHANGES_LENGTH = "changes_length"  # changes the length of sequences
MIXES_TARGETS = "mixes_targets"  # turns targets into combinations of targets
SMOOTHS_TARGETS = "smooths_targets"  # moves targets towards another distribution
INTERPOLATES_LOSS = "interpolates_loss"  # replaces the loss by a combination of losses
REPLACES_MODEL = "replaces_model"  # swaps the whole model
REPLACES_CONVS = "replaces_convs"  # swaps convolution or pooling layers
ADDS_CONVS = "adds_convs"  # brings new convolution layers into the model
REPLACES_NORMS = "replaces_norms"  # swaps normalisation layers
ADDS_NORMS = "adds_norms"  # brings new normalisation layers into the model
CHANGES_MEMORY_FORMAT = "changes_memory_format"  # changes the strides of weights
FREEZES_WEIGHTS = "freezes_weights"  # stops training some weights
CLIPS_GRADIENTS = "clips_gradients"  # limits gradients before the step
WRAPS_OPTIMIZER = "wraps_optimizer"  # puts an optimizer around the optimizer
AVERAGES_WEIGHTS = "averages_weights"  # keeps an average of the weights beside them

# What each effect is in messages: "..., which <phrase>".
PHRASES = {
    PRUNES_BATCH: "prunes the batch",
    TRANSFORMS_BATCH: "transforms the batch",
    CHANGES_RESOLUTION: "changes the resolution",
    CHANGES_LENGTH: "changes the length of sequences",
    MIXES_TARGETS: "mixes targets",
    SMOOTHS_TARGETS: "smooths targets",
    INTERPOLATES_LOSS: "interpolates the loss",
    REPLACES_MODEL: "replaces the model",
    REPLACES_CONVS: "replaces convolution or pooling layers",
    ADDS_CONVS: "adds convolution layers",
    REPLACES_NORMS: "replaces normalisation layers",
    ADDS_NORMS: "adds normalisation layers",
    CHANGES_MEMORY_FORMAT: "changes the memory format",
    FREEZES_WEIGHTS: "freezes weights",
    CLIPS_GRADIENTS: "clips gradients",
    WRAPS_OPTIMIZER: "wraps the optimizer",
    AVERAGES_WEIGHTS: "averages weights",
}
EFFECTS = frozenset(PHRASES)


@dataclass(frozen=True)
class Placement:
    """Where an algorithm stands among others, declared by effect.

    Args:
        provides: What this algorithm does.
        before: It acts before every algorithm that provides one of these.
        after: It acts after every algorithm that provides one of these.
        excludes: It cannot be used with an algorithm that provides one of these; the engine raises.
        discourages: It should not be used with an algorithm that provides one of these; the engine warns.

    An effect is a constant of `composer.core` (`PRUNES_BATCH`, ...) or a name of your own, written `"vendor:effect"`.

    Raises:
        ValueError: An effect is neither.
        TypeError: An effect is not a string, or one string is given where a set of them is needed.

    Example:
        >>> Placement(provides={PRUNES_BATCH}, before={TRANSFORMS_BATCH}).before
        frozenset({'transforms_batch'})
    """

    provides: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()
    discourages: frozenset[str] = frozenset()

    def __init__(
        self,
        provides: Iterable[str] = (),
        before: Iterable[str] = (),
        after: Iterable[str] = (),
        excludes: Iterable[str] = (),
        discourages: Iterable[str] = (),
    ) -> None:
        given = (provides, before, after, excludes, discourages)
        for field, effects in zip(fields(self), given, strict=True):
            object.__setattr__(self, field.name, _checked(field.name, effects))


def _checked(argument: str, effects: Any) -> frozenset[str]:
    if isinstance(effects, str):
        raise TypeError(f"`{argument}` must be a set of effects, got the string {effects!r}. Write `{{{effects!r}}}`.")
    for effect in effects:
        if not isinstance(effect, str):
            raise TypeError(f"`{argument}` must hold effects, which are strings, got {effect!r}.")
        vendor, _, name = effect.partition(":")
        if effect not in EFFECTS and not (vendor and name):
            raise ValueError(
                f"`{argument}` must hold effects known to `composer.core` or names of your own such as "
                f"'vendor:effect', got {effect!r}. Known are {', '.join(sorted(EFFECTS))}."
            )
    return frozenset(effects)
