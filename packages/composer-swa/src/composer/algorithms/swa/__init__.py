"""SWA: average the weights of late epochs."""

from composer.algorithms.swa.swa import SWA as SWA

__all__ = ["SWA"]
