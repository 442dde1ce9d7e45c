"""Recorded training runs as one web page, and as Python objects."""

from composer.report._model import Act as Act
from composer.report._model import AlgorithmActions as AlgorithmActions
from composer.report._model import Checkpoint as Checkpoint
from composer.report._model import Evaluation as Evaluation
from composer.report._model import ModuleChange as ModuleChange
from composer.report._model import PlanEntry as PlanEntry
from composer.report._model import Resume as Resume
from composer.report._model import Run as Run
from composer.report._model import Series as Series
from composer.report._model import Table as Table
from composer.report._page import Report as Report
from composer.report._page import write_report as write_report
from composer.report._read import RunNotFoundError as RunNotFoundError
from composer.report._read import find_runs as find_runs
from composer.report._read import read_run as read_run

Deeds = AlgorithmActions
"""The former name of `AlgorithmActions`."""

__all__ = [
    "Act",
    "AlgorithmActions",
    "Checkpoint",
    "Deeds",
    "Evaluation",
    "ModuleChange",
    "PlanEntry",
    "Report",
    "Resume",
    "Run",
    "RunNotFoundError",
    "Series",
    "Table",
    "find_runs",
    "read_run",
    "write_report",
]
