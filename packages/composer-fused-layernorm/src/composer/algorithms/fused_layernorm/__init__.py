"""FusedLayerNorm: layer normalization without the casts of autocast, with weights in float32."""

from composer.algorithms.fused_layernorm.fused_layernorm import FusedLayerNorm as FusedLayerNorm
from composer.algorithms.fused_layernorm.fused_layernorm import MixedLayerNorm as MixedLayerNorm
from composer.algorithms.fused_layernorm.fused_layernorm import apply_fused_layernorm as apply_fused_layernorm

__all__ = ["FusedLayerNorm", "MixedLayerNorm", "apply_fused_layernorm"]
