"""The recipes of `composer-train digits`: a small residual network on small images, plain and composed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.algorithms.ema import EMA
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.mixup import MixUp
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.sam import SAM
from composer.core import Algorithm
from composer.recipes._hparams import Data, Network, Recipe, Training

__all__ = ["ALGORITHMS", "COMPOSED", "TUNED", "composed", "make_algorithms", "plain"]

ALGORITHMS: Mapping[str, type[Algorithm]] = {
    "blurpool": BlurPool,
    "channels_last": ChannelsLast,
    "ema": EMA,
    "label_smoothing": LabelSmoothing,
    "mixup": MixUp,
    "progressive_resizing": ProgressiveResizing,
    "sam": SAM,
}
"""What can be composed, by the names that the command line uses."""

TUNED: Mapping[str, Mapping[str, Any]] = {
    "ema": {"half_life": "20ba"},
    "label_smoothing": {"smoothing": 0.1},
    "mixup": {"alpha": 0.2},
}
"""Arguments that suit these images better than an algorithm's own defaults."""

COMPOSED: Sequence[str] = ("blurpool", "channels_last", "ema", "label_smoothing", "mixup")
"""What the composed recipe composes."""


def plain(data: Data | None = None, network: Network | None = None, training: Training | None = None) -> Recipe:
    """The plain recipe: no algorithms.

    Args:
        data: What to train on. None: the handwritten digits.
        network: The network. None: the default.
        training: The optimisation. None: what suits the digits.
    """
    return Recipe("plain", (), data or Data(), network or Network(), training or Training())


def composed(
    data: Data | None = None,
    network: Network | None = None,
    training: Training | None = None,
    algorithms: Sequence[Algorithm] | None = None,
) -> Recipe:
    """The composed recipe: the plain one, and algorithms.

    Args:
        data: What to train on. None: the handwritten digits.
        network: The network. None: the default.
        training: The optimisation. None: what suits the digits.
        algorithms: What to compose. None: what helps on the digits, with the arguments that suit them.

    Example:
        >>> [type(algorithm).__name__ for algorithm in composed().algorithms]
        ['BlurPool', 'ChannelsLast', 'EMA', 'LabelSmoothing', 'MixUp']
    """
    chosen = make_algorithms(COMPOSED) if algorithms is None else algorithms
    return Recipe("composed", chosen, data or Data(), network or Network(), training or Training())


def make_algorithms(names: Sequence[str], arguments: Mapping[str, Mapping[str, Any]] | None = None) -> list[Algorithm]:
    """Algorithms by name.

    Args:
        names: Keys of `ALGORITHMS`.
        arguments: Arguments by name. None: `TUNED`.

    Raises:
        ValueError: A name is unknown, or an algorithm refuses its arguments.
    """
    arguments = TUNED if arguments is None else arguments
    made = []
    for name in names:
        if name not in ALGORITHMS:
            raise ValueError(f"`names` must be among {', '.join(ALGORITHMS)}, got {name!r}.")
        made.append(ALGORITHMS[name](**arguments.get(name, {})))
    return made
