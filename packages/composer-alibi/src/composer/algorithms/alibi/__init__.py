"""ALiBi: attention with linear biases instead of position embeddings."""

from composer.algorithms.alibi.alibi import Alibi as Alibi
from composer.algorithms.alibi.alibi import apply_alibi as apply_alibi

__all__ = ["Alibi", "apply_alibi"]
