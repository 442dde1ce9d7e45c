"""Events, time, state, algorithms, callbacks and the engine that runs them."""

from composer.core._errors import ComposerError as ComposerError
from composer.core._errors import ConflictError as ConflictError
from composer.core._errors import OrderingError as OrderingError
from composer.core._explain import Plan as Plan
from composer.core._explain import PlanRow as PlanRow
from composer.core._placement import ADDS_NORMS as ADDS_NORMS
from composer.core._placement import AUGMENTS_IMAGES as AUGMENTS_IMAGES
from composer.core._placement import AVERAGES_WEIGHTS as AVERAGES_WEIGHTS
from composer.core._placement import CHANGES_LAYERS as CHANGES_LAYERS
from composer.core._placement import CHANGES_LENGTH as CHANGES_LENGTH
from composer.core._placement import CHANGES_MEMORY_FORMAT as CHANGES_MEMORY_FORMAT
from composer.core._placement import CHANGES_RESOLUTION as CHANGES_RESOLUTION
from composer.core._placement import CLIPS_GRADIENTS as CLIPS_GRADIENTS
from composer.core._placement import DROPS_PIXELS as DROPS_PIXELS
from composer.core._placement import EFFECTS as EFFECTS
from composer.core._placement import ERASES_PIXELS as ERASES_PIXELS
from composer.core._placement import FACTORIZES_WEIGHTS as FACTORIZES_WEIGHTS
from composer.core._placement import FREEZES_WEIGHTS as FREEZES_WEIGHTS
from composer.core._placement import INTERPOLATES_LOSS as INTERPOLATES_LOSS
from composer.core._placement import MIXES_AUGMENTATIONS as MIXES_AUGMENTATIONS
from composer.core._placement import MIXES_INPUTS as MIXES_INPUTS
from composer.core._placement import MIXES_TARGETS as MIXES_TARGETS
from composer.core._placement import PASTES_REGIONS as PASTES_REGIONS
from composer.core._placement import PRUNES_BATCH as PRUNES_BATCH
from composer.core._placement import REPLACES_ATTENTION as REPLACES_ATTENTION
from composer.core._placement import REPLACES_BLOCKS as REPLACES_BLOCKS
from composer.core._placement import REPLACES_CONVS as REPLACES_CONVS
from composer.core._placement import REPLACES_DROPOUT as REPLACES_DROPOUT
from composer.core._placement import REPLACES_FEEDFORWARD as REPLACES_FEEDFORWARD
from composer.core._placement import REPLACES_LAYERNORMS as REPLACES_LAYERNORMS
from composer.core._placement import REPLACES_MODEL as REPLACES_MODEL
from composer.core._placement import REPLACES_NORMS as REPLACES_NORMS
from composer.core._placement import RESHAPES_SEQUENCES as RESHAPES_SEQUENCES
from composer.core._placement import SCALES_SCHEDULE as SCALES_SCHEDULE
from composer.core._placement import SMOOTHS_TARGETS as SMOOTHS_TARGETS
from composer.core._placement import STANDARDIZES_WEIGHTS as STANDARDIZES_WEIGHTS
from composer.core._placement import SWAPS_WEIGHTS as SWAPS_WEIGHTS
from composer.core._placement import TRANSFORMS_BATCH as TRANSFORMS_BATCH
from composer.core._placement import WRAPS_CONVS as WRAPS_CONVS
from composer.core._placement import WRAPS_OPTIMIZER as WRAPS_OPTIMIZER
from composer.core._placement import Placement as Placement
from composer.core.algorithm import Algorithm as Algorithm
from composer.core.callback import Callback as Callback
from composer.core.data_spec import DataSpec as DataSpec
from composer.core.data_spec import ensure_data_spec as ensure_data_spec
from composer.core.engine import Engine as Engine
from composer.core.engine import Trace as Trace
from composer.core.engine import Traces as Traces
from composer.core.evaluator import Evaluator as Evaluator
from composer.core.evaluator import ensure_evaluator as ensure_evaluator
from composer.core.event import Event as Event
from composer.core.passes import AlgorithmPass as AlgorithmPass
from composer.core.precision import Precision as Precision
from composer.core.precision import get_precision_context as get_precision_context
from composer.core.serializable import Resumable as Resumable
from composer.core.serializable import Serializable as Serializable
from composer.core.state import State as State
from composer.core.time import Time as Time
from composer.core.time import Timestamp as Timestamp
from composer.core.time import TimeUnit as TimeUnit
from composer.core.time import ensure_time as ensure_time
from composer.core.types import JSON as JSON
from composer.core.types import Batch as Batch
from composer.core.types import Dataset as Dataset
from composer.core.types import MemoryFormat as MemoryFormat
from composer.core.types import TrainerMode as TrainerMode

__all__ = [
    "ADDS_NORMS",
    "AUGMENTS_IMAGES",
    "AVERAGES_WEIGHTS",
    "CHANGES_LAYERS",
    "CHANGES_LENGTH",
    "CHANGES_MEMORY_FORMAT",
    "CHANGES_RESOLUTION",
    "CLIPS_GRADIENTS",
    "DROPS_PIXELS",
    "EFFECTS",
    "ERASES_PIXELS",
    "FACTORIZES_WEIGHTS",
    "FREEZES_WEIGHTS",
    "INTERPOLATES_LOSS",
    "JSON",
    "MIXES_AUGMENTATIONS",
    "MIXES_INPUTS",
    "MIXES_TARGETS",
    "PASTES_REGIONS",
    "PRUNES_BATCH",
    "REPLACES_ATTENTION",
    "REPLACES_BLOCKS",
    "REPLACES_CONVS",
    "REPLACES_DROPOUT",
    "REPLACES_FEEDFORWARD",
    "REPLACES_LAYERNORMS",
    "REPLACES_MODEL",
    "REPLACES_NORMS",
    "RESHAPES_SEQUENCES",
    "SCALES_SCHEDULE",
    "SMOOTHS_TARGETS",
    "STANDARDIZES_WEIGHTS",
    "SWAPS_WEIGHTS",
    "TRANSFORMS_BATCH",
    "WRAPS_CONVS",
    "WRAPS_OPTIMIZER",
    "Algorithm",
    "AlgorithmPass",
    "Batch",
    "Callback",
    "ComposerError",
    "ConflictError",
    "DataSpec",
    "Dataset",
    "Engine",
    "Evaluator",
    "Event",
    "MemoryFormat",
    "OrderingError",
    "Placement",
    "Plan",
    "PlanRow",
    "Precision",
    "Serializable",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "Traces",
    "TrainerMode",
    "ensure_data_spec",
    "ensure_evaluator",
    "ensure_time",
    "get_precision_context",
]
