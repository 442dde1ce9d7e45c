"""ChunkedCrossEntropy: the loss of a linear head without the logits of the whole batch."""

from composer.algorithms.chunked_cross_entropy.chunked_cross_entropy import (
    ChunkedCrossEntropy as ChunkedCrossEntropy,
)
from composer.algorithms.chunked_cross_entropy.chunked_cross_entropy import (
    compute_chunked_cross_entropy as compute_chunked_cross_entropy,
)

__all__ = ["ChunkedCrossEntropy", "compute_chunked_cross_entropy"]
