"""The algorithm: wraps the run's optimizer before training."""

from __future__ import annotations

from composer.algorithms.sam._arguments import check_arguments
from composer.algorithms.sam._optimizer import SAMOptimizer
from composer.core import WRAPS_OPTIMIZER, Algorithm, Event, Placement, State
from composer.loggers import Logger
from composer.utils import check_flags, plain_number

__all__ = ["SAM", "SAMOptimizer"]


class SAM(Algorithm):
    """Looks for weights whose whole neighbourhood has a low loss, not only the point itself.

    Wraps every optimizer of the run in a `SAMOptimizer`: at BEFORE_LOAD, so that a checkpoint finds the optimizer it
    was saved from, and at AFTER_LOAD what is not wrapped yet, for loops that announce only that.

    **Events** BEFORE_LOAD, AFTER_LOAD. In training, the events from BEFORE_TRAIN_BATCH to AFTER_TRAIN_BATCH happen
    twice in a step with two passes. **Writes** `state.optimizers`. **Cost** a second forward and backward pass, and
    memory for another set of weights, in every `interval`-th step. **When not to use it** when the model sees each
    example once, as large language models do; with another algorithm that wraps the optimizer.

    Args:
        rho: At least 0; the radius of the neighbourhood. Use more with a larger interval, such as 0.5 with 10.
        epsilon: Positive; keeps a gradient of zero from dividing by zero.
        interval: Look at the neighbourhood in every so many steps.
        sync_ascent: Whether all ranks climb along the gradient of the whole batch, which takes another exchange,
            instead of each along its own: then several ranks train as one does. Ranks of a sharded model always do.

    Raises:
        ValueError: `rho` is negative, `epsilon` is not positive or `interval` is below 1.

    Example:
        >>> SAM(rho=0.5, interval=10)
        SAM(rho=0.5,epsilon=1e-12,interval=10,sync_ascent=False)

    Source: Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv:2010.01412,
        section 2, algorithm 1 with p = 2.
    Differs: `interval`, `sync_ascent`. Without the latter, each rank climbs along its own gradient (the paper's
        m-sharpness, section 4.1, with m the batch of a rank). Both passes draw the same random numbers. A loss of
        exactly zero is a loss. The state of the base optimizer is saved and loaded, so resuming is exact and needs no
        warning.
    """

    events = frozenset({Event.BEFORE_LOAD, Event.AFTER_LOAD})
    placement = Placement(provides={WRAPS_OPTIMIZER}, excludes={WRAPS_OPTIMIZER})

    def __init__(self, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1, sync_ascent: bool = False) -> None:
        check_arguments(rho, epsilon, interval)
        check_flags(sync_ascent=sync_ascent)
        self.rho, self.epsilon = plain_number(rho), plain_number(epsilon)
        self.interval, self.sync_ascent = plain_number(interval), sync_ascent

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Wrap the optimizers that are not wrapped."""
        state.optimizers = [
            o
            if isinstance(o, SAMOptimizer)
            else SAMOptimizer(o, self.rho, self.epsilon, self.interval, self.sync_ascent)
            for o in state.optimizers
        ]
