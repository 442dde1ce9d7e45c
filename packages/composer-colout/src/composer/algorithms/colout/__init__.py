"""ColOut: drop random rows and columns of images, which makes them smaller."""

from composer.algorithms.colout.colout import ColOut as ColOut
from composer.algorithms.colout.colout import ColOutTransform as ColOutTransform
from composer.algorithms.colout.colout import batch_colout as batch_colout
from composer.algorithms.colout.colout import colout_batch as colout_batch

__all__ = ["ColOut", "ColOutTransform", "batch_colout", "colout_batch"]
