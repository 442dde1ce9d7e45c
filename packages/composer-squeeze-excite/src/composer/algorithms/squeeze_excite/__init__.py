"""SqueezeExcite: let a model learn to weight the channels of its feature maps."""

from composer.algorithms.squeeze_excite.squeeze_excite import SqueezeExcite as SqueezeExcite
from composer.algorithms.squeeze_excite.squeeze_excite import apply_se as apply_se
from composer.algorithms.squeeze_excite.squeeze_excite import apply_squeeze_excite as apply_squeeze_excite
from composer.algorithms.squeeze_excite.squeeze_excite_layers import SqueezeExcite2d as SqueezeExcite2d
from composer.algorithms.squeeze_excite.squeeze_excite_layers import SqueezeExciteConv2d as SqueezeExciteConv2d

__all__ = ["SqueezeExcite", "SqueezeExcite2d", "SqueezeExciteConv2d", "apply_se", "apply_squeeze_excite"]
