"""Evidence: which training methods pay on a task, measured with controls, intervals and a ledger."""

from composer.evidence.ledger import Ledger as Ledger
from composer.evidence.ledger import LedgerError as LedgerError
from composer.evidence.ledger import merge as merge
from composer.evidence.methods import METHODS as METHODS
from composer.evidence.methods import Method as Method
from composer.evidence.run import RunResult as RunResult
from composer.evidence.run import RunSpec as RunSpec
from composer.evidence.runner import Incomplete as Incomplete
from composer.evidence.runner import Runner as Runner
from composer.evidence.study import Plan as Plan
from composer.evidence.study import Study as Study
from composer.evidence.study import replay as replay
from composer.evidence.task import Grid as Grid
from composer.evidence.task import Parts as Parts
from composer.evidence.task import Task as Task
from composer.evidence.task import Variant as Variant
from composer.evidence.task import load_task as load_task

__all__ = [
    "METHODS",
    "Grid",
    "Incomplete",
    "Ledger",
    "LedgerError",
    "Method",
    "Parts",
    "Plan",
    "RunResult",
    "RunSpec",
    "Runner",
    "Study",
    "Task",
    "Variant",
    "load_task",
    "merge",
    "replay",
]
