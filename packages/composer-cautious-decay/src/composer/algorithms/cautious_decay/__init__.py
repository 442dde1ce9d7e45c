"""CautiousDecay: decay only the weights that the step moves towards zero."""

from composer.algorithms.cautious_decay.cautious_decay import CautiousDecay as CautiousDecay
from composer.algorithms.cautious_decay.cautious_decay import apply_cautious_decay as apply_cautious_decay

__all__ = ["CautiousDecay", "apply_cautious_decay"]
