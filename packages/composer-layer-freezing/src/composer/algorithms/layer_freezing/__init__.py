"""LayerFreezing: stop training early layers before late ones."""

from composer.algorithms.layer_freezing.layer_freezing import LayerFreezing as LayerFreezing
from composer.algorithms.layer_freezing.layer_freezing import freeze_layers as freeze_layers

__all__ = ["LayerFreezing", "freeze_layers"]
