"""Helpers for the tests of algorithms, callbacks and training loops."""

from composer.testing._callbacks import EventCounterCallback as EventCounterCallback
from composer.testing._compare import deep_compare as deep_compare
from composer.testing._data import InfiniteClassificationDataset as InfiniteClassificationDataset
from composer.testing._data import RandomClassificationDataset as RandomClassificationDataset
from composer.testing._data import RandomImageDataset as RandomImageDataset
from composer.testing._data import RandomSegmentationDataset as RandomSegmentationDataset
from composer.testing._data import RandomTextDataset as RandomTextDataset
from composer.testing._models import ConvModel as ConvModel
from composer.testing._models import SimpleConvModel as SimpleConvModel
from composer.testing._models import SimpleModel as SimpleModel
from composer.testing._models import SimpleModelWithDropout as SimpleModelWithDropout
from composer.testing._models import SimpleSegmentationModel as SimpleSegmentationModel
from composer.testing._models import SimpleTransformerModel as SimpleTransformerModel

__all__ = [
    "ConvModel",
    "EventCounterCallback",
    "InfiniteClassificationDataset",
    "RandomClassificationDataset",
    "RandomImageDataset",
    "RandomSegmentationDataset",
    "RandomTextDataset",
    "SimpleConvModel",
    "SimpleModel",
    "SimpleModelWithDropout",
    "SimpleSegmentationModel",
    "SimpleTransformerModel",
    "deep_compare",
]
