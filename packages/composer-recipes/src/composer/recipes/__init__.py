"""Built-in recipes: train the same network plainly and with composed algorithms, and compare."""

from composer.recipes._recipe import SGD as SGD
from composer.recipes._recipe import AdamW as AdamW
from composer.recipes._recipe import Metric as Metric
from composer.recipes._recipe import Recipe as Recipe
from composer.recipes._recipe import Runs as Runs
from composer.recipes._recipe import Task as Task
from composer.recipes._results import Result as Result
from composer.recipes._results import Run as Run
from composer.recipes._results import TimeToQuality as TimeToQuality
from composer.recipes._results import noise_of_time_to_quality as noise_of_time_to_quality
from composer.recipes._results import time_to_quality as time_to_quality
from composer.recipes.runner import Comparison as Comparison
from composer.recipes.runner import compare as compare
from composer.recipes.runner import run as run

__all__ = [
    "SGD",
    "AdamW",
    "Comparison",
    "Metric",
    "Recipe",
    "Result",
    "Run",
    "Runs",
    "Task",
    "TimeToQuality",
    "compare",
    "noise_of_time_to_quality",
    "run",
    "time_to_quality",
]
