"""GyroDropout: train a fixed set of subnetworks, a few at a time."""

from composer.algorithms.gyro_dropout.gyro_dropout import GyroDropout as GyroDropout
from composer.algorithms.gyro_dropout.gyro_dropout import GyroDropoutLayer as GyroDropoutLayer
from composer.algorithms.gyro_dropout.gyro_dropout import apply_gyro_dropout as apply_gyro_dropout

__all__ = ["GyroDropout", "GyroDropoutLayer", "apply_gyro_dropout"]
