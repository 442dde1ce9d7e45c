"""Test utilities for algorithms, callbacks and training loops."""

import sys as _sys

if "pytest" in _sys.modules:
    _sys.modules["pytest"].register_assert_rewrite("composer.testing._contract")

from composer.testing._callbacks import EventCounterCallback as EventCounterCallback
from composer.testing._compare import deep_compare as deep_compare
from composer.testing._contract import AlgorithmContract as AlgorithmContract
from composer.testing._contract import DatasetTransformContract as DatasetTransformContract
from composer.testing._contract import train_by_hand as train_by_hand
from composer.testing._data import InfiniteClassificationDataset as InfiniteClassificationDataset
from composer.testing._data import RandomClassificationDataset as RandomClassificationDataset
from composer.testing._data import RandomImageDataset as RandomImageDataset
from composer.testing._data import RandomSegmentationDataset as RandomSegmentationDataset
from composer.testing._data import RandomTextDataset as RandomTextDataset
from composer.testing._hosts import HostProblem as HostProblem
from composer.testing._loggers import LoggedRun as LoggedRun
from composer.testing._models import ConvModel as ConvModel
from composer.testing._models import SimpleConvModel as SimpleConvModel
from composer.testing._models import SimpleModel as SimpleModel
from composer.testing._models import SimpleModelWithDropout as SimpleModelWithDropout
from composer.testing._models import SimpleSegmentationModel as SimpleSegmentationModel
from composer.testing._models import SimpleTransformerModel as SimpleTransformerModel
from composer.testing._processes import restore_signals as restore_signals
from composer.testing._processes import run_on_ranks as run_on_ranks
from composer.testing._resumption import ResumptionReport as ResumptionReport
from composer.testing._resumption import assert_resumes_exactly as assert_resumes_exactly

__all__ = [
    "AlgorithmContract",
    "ConvModel",
    "DatasetTransformContract",
    "EventCounterCallback",
    "HostProblem",
    "InfiniteClassificationDataset",
    "LoggedRun",
    "RandomClassificationDataset",
    "RandomImageDataset",
    "RandomSegmentationDataset",
    "RandomTextDataset",
    "ResumptionReport",
    "SimpleConvModel",
    "SimpleModel",
    "SimpleModelWithDropout",
    "SimpleSegmentationModel",
    "SimpleTransformerModel",
    "assert_resumes_exactly",
    "deep_compare",
    "restore_signals",
    "run_on_ranks",
    "train_by_hand",
]
