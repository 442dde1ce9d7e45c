"""Built-in recipes: train the same network plainly and with composed algorithms, and compare."""

from composer.recipes._hparams import Data as Data
from composer.recipes._hparams import Network as Network
from composer.recipes._hparams import Recipe as Recipe
from composer.recipes._hparams import Runs as Runs
from composer.recipes._hparams import Training as Training
from composer.recipes._run import Comparison as Comparison
from composer.recipes._run import Result as Result
from composer.recipes._run import Run as Run
from composer.recipes._run import compare as compare
from composer.recipes._run import run as run

__all__ = ["Comparison", "Data", "Network", "Recipe", "Result", "Run", "Runs", "Training", "compare", "run"]
