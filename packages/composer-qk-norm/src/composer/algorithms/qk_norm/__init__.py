"""QKNorm: normalize the queries and keys of attention."""

from composer.algorithms.qk_norm.qk_norm import HeadNorm as HeadNorm
from composer.algorithms.qk_norm.qk_norm import QKNorm as QKNorm
from composer.algorithms.qk_norm.qk_norm import apply_qk_norm as apply_qk_norm

__all__ = ["HeadNorm", "QKNorm", "apply_qk_norm"]
