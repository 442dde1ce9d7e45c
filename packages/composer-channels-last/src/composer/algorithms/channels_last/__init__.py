"""ChannelsLast: store convolution weights in the memory layout that is fastest for them."""

from composer.algorithms.channels_last.channels_last import ChannelsLast as ChannelsLast
from composer.algorithms.channels_last.channels_last import apply_channels_last as apply_channels_last

__all__ = ["ChannelsLast", "apply_channels_last"]
