"""Events, time, state, algorithms, callbacks and the engine that runs them.

Names are imported on first use. `DataSpec`, `Evaluator` and `HostedRun` belong to composer-loop.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

from composer.core import effects
from composer.core._registry import lazy_namespace
from composer.core.effects import *  # noqa: F403 -- the effects are listed there

_OWN = {
    "algorithm": "Algorithm",
    "callback": "Callback",
    "effects": " ".join(effects.__all__),
    "engine": "Engine Plan PlanRow Trace Traces",
    "event": "Event",
    "ordering": "ComposerError ConflictError OrderingError",
    "passes": "AlgorithmPass",
    "precision": "Precision get_precision_context",
    "serializable": "Resumable Serializable",
    "state": "State",
    "time": "Time TimeUnit Timestamp ensure_time",
    "types": "Batch Dataset JSON",
}
__getattr__, __dir__ = lazy_namespace("composer.core", globals(), _OWN)
