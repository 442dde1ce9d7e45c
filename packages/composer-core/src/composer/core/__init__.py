"""Events, time, state, algorithms, callbacks and the engine that runs them."""

import sys
from typing import TYPE_CHECKING, Any

from composer.core import effects
from composer.core.algorithm import Algorithm as Algorithm
from composer.core.callback import Callback as Callback
from composer.core.data_spec import DataSpec as DataSpec
from composer.core.data_spec import ensure_data_spec as ensure_data_spec
from composer.core.effects import *  # noqa: F403 -- the effects are listed there
from composer.core.engine import Engine as Engine
from composer.core.engine import Plan as Plan
from composer.core.engine import PlanRow as PlanRow
from composer.core.engine import Trace as Trace
from composer.core.engine import Traces as Traces
from composer.core.evaluator import Evaluator as Evaluator
from composer.core.evaluator import ensure_evaluator as ensure_evaluator
from composer.core.event import Event as Event
from composer.core.ordering import ComposerError as ComposerError
from composer.core.ordering import ConflictError as ConflictError
from composer.core.ordering import OrderingError as OrderingError
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

if not TYPE_CHECKING:  # type checkers see the re-exports above; they cannot follow a list that is put together
    __all__ = [
        *effects.__all__,
        "JSON",
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

    def __getattr__(name: str) -> Any:
        if name != "HostedRun":  # which composer-loop has
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from composer.core._registry import load, missing_error

        return load(__name__, name, missing_error(sys._getframe(1)))
