"""Effects of algorithms, and placements: where an algorithm acts relative to the effects of others.

An algorithm declares which effects it provides, and which effects it must precede or follow. So the algorithms of
different packages are ordered without knowing each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

PRUNES_BATCH = "prunes_batch"
"""Effect: drops examples, judged on clean inputs."""
CHANGES_BATCH_SIZE = "changes_batch_size"
"""Effect: changes the number of examples per step."""
TRANSFORMS_BATCH = "transforms_batch"
"""Effect: changes inputs or targets of the batch."""
AUGMENTS_IMAGES = "augments_images"
"""Effect: adds random augmentations to the dataset's transform."""
MIXES_AUGMENTATIONS = "mixes_augmentations"
"""Effect: blends images of the dataset with augmented versions of themselves."""
DROPS_PIXELS = "drops_pixels"
"""Effect: leaves out rows and columns of images."""
CHANGES_RESOLUTION = "changes_resolution"
"""Effect: changes the height and width of images."""
ERASES_PIXELS = "erases_pixels"
"""Effect: blanks regions of images."""
MIXES_INPUTS = "mixes_inputs"
"""Effect: blends inputs of different examples."""
PASTES_REGIONS = "pastes_regions"
"""Effect: pastes regions of one example into another."""
PACKS_SEQUENCES = "packs_sequences"
"""Effect: puts several documents into one row."""
RESHAPES_SEQUENCES = "reshapes_sequences"
"""Effect: reshapes the tokens of a batch into more, shorter sequences."""
CHANGES_LENGTH = "changes_length"
"""Effect: changes the length of sequences."""
MIXES_TARGETS = "mixes_targets"
"""Effect: turns targets into combinations of targets."""
SMOOTHS_TARGETS = "smooths_targets"
"""Effect: moves targets towards another distribution."""
INTERPOLATES_LOSS = "interpolates_loss"
"""Effect: replaces the loss by a combination of losses."""
REPLACES_LOSS = "replaces_loss"
"""Effect: computes the loss itself, so that the outputs have no logits."""
WEIGHS_LOSS = "weighs_loss"
"""Effect: weighs the loss against another one, such as that of a teacher."""
ADDS_LOSS = "adds_loss"
"""Effect: adds a term to the loss."""
SCALES_SCHEDULE = "scales_schedule"
"""Effect: changes the duration of the run and its schedules."""
REPLACES_MODEL = "replaces_model"
"""Effect: replaces the whole model."""
CHANGES_LAYERS = "changes_layers"
"""Effect: changes layers of the model; implied by effects on one kind of layer."""
REPLACES_BLOCKS = "replaces_blocks"
"""Effect: replaces blocks of several layers."""
REPLACES_ATTENTION = "replaces_attention"
"""Effect: replaces attention layers."""
REPLACES_FEEDFORWARD = "replaces_feedforward"
"""Effect: replaces the feed-forward layers of transformers."""
REPLACES_DROPOUT = "replaces_dropout"
"""Effect: replaces dropout layers."""
WRAPS_CONVS = "wraps_convs"
"""Effect: wraps convolution layers in a module."""
REPLACES_CONVS = "replaces_convs"
"""Effect: replaces convolution or pooling layers."""
FACTORIZES_WEIGHTS = "factorizes_weights"
"""Effect: splits layers into layers of lower rank."""
STANDARDIZES_WEIGHTS = "standardizes_weights"
"""Effect: computes weights from other weights in every forward pass."""
ADDS_NORMS = "adds_norms"
"""Effect: adds normalization layers to the model."""
REPLACES_NORMS = "replaces_norms"
"""Effect: replaces normalization layers."""
REPLACES_LAYERNORMS = "replaces_layernorms"
"""Effect: replaces layer norms."""
CHANGES_MEMORY_FORMAT = "changes_memory_format"
"""Effect: changes the strides of weights."""
FREEZES_WEIGHTS = "freezes_weights"
"""Effect: stops training some weights."""
REPLACES_OPTIMIZER = "replaces_optimizer"
"""Effect: replaces the optimizers."""
STEPS_MATRICES = "steps_matrices"
"""Effect: steps the hidden matrices with an optimizer of its own."""
CLIPS_GRADIENTS = "clips_gradients"
"""Effect: limits gradients before the step."""
WRAPS_OPTIMIZER = "wraps_optimizer"
"""Effect: wraps the optimizer in another optimizer."""
DISPLACES_WEIGHTS = "displaces_weights"
"""Effect: moves the weights for the passes of a step; between steps they are what the optimizer has made of them."""
PINS_NORMS = "pins_norms"
"""Effect: restores the norms of weights after a step."""
DECAYS_WEIGHTS = "decays_weights"
"""Effect: decays weights itself after a step, instead of the optimizer."""
AVERAGES_WEIGHTS = "averages_weights"
"""Effect: maintains an average of the weights."""
SWAPS_WEIGHTS = "swaps_weights"
"""Effect: temporarily swaps in other weights, to evaluate or save them, while its attribute `swapped` is True."""

EFFECTS = frozenset(value for name, value in vars().items() if name.isupper() and value == name.lower())
"""The effects of `composer.core`; custom ones have names of the form `"vendor:effect"`."""
if not TYPE_CHECKING:  # type checkers see the constants; they cannot follow a list that is put together
    __all__ = ["EFFECTS", "Placement", *(effect.upper() for effect in sorted(EFFECTS))]  # noqa: PLE0604 - these are strings

# Effects on one kind of layer, which imply CHANGES_LAYERS.
_ON_LAYERS = frozenset(
    {
        REPLACES_BLOCKS,
        REPLACES_ATTENTION,
        REPLACES_FEEDFORWARD,
        REPLACES_DROPOUT,
        WRAPS_CONVS,
        REPLACES_CONVS,
        FACTORIZES_WEIGHTS,
        STANDARDIZES_WEIGHTS,
        ADDS_NORMS,
        REPLACES_NORMS,
        REPLACES_LAYERNORMS,
    }
)


@dataclass(frozen=True)
class Placement:
    """The position of an algorithm among others, declared by effects.

    An effect is a constant of `composer.core` (`PRUNES_BATCH`, ...) or a custom name of the form `"vendor:effect"`.

    Args:
        provides: The effects of this algorithm. Effects on one kind of layer (replacing, wrapping, factorizing,
            standardizing or adding layers) imply CHANGES_LAYERS.
        before: Effects; this algorithm acts before every algorithm that provides one of them.
        after: Effects; this algorithm acts after every algorithm that provides one of them.
        excludes: Effects; together with an algorithm that provides one of them, the engine raises an error.
        discourages: Effects; together with an algorithm that provides one of them, the engine warns.

    Raises:
        ValueError: An effect is unknown and does not have the form `"vendor:effect"`.
        TypeError: An effect is not a string, or an argument is a string instead of a set of strings.

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
        if self.provides & _ON_LAYERS:
            object.__setattr__(self, "provides", self.provides | {CHANGES_LAYERS})


def _checked(argument: str, effects: Any) -> frozenset[str]:
    if isinstance(effects, str):
        raise TypeError(f"`{argument}` must be a set of effects, got the string {effects!r}. Write `{{{effects!r}}}`.")
    for effect in effects:
        if not isinstance(effect, str):
            raise TypeError(f"`{argument}` must contain effects, which are strings, got {effect!r}.")
        vendor, _, name = effect.partition(":")
        if effect not in EFFECTS and not (vendor and name):
            raise ValueError(
                f"`{argument}` must contain effects of `composer.core` or custom names such as "
                f"'vendor:effect', got {effect!r}. The effects of `composer.core` are {', '.join(sorted(EFFECTS))}."
            )
    return frozenset(effects)
