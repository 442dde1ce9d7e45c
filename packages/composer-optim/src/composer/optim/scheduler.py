"""Schedules: functions of the training state that scale the learning rate.

Times are given in any unit but seconds: epochs ("10ep"), batches ("500ba"), samples, tokens, or a fraction of the run
("0.5dur"). A scale schedule ratio (`ssr`) below 1 shortens all of them together with the run.
"""

from composer.optim._compile import ComposerScheduler as ComposerScheduler
from composer.optim._compile import compile_composer_scheduler as compile_composer_scheduler
from composer.optim._schedules import ConstantScheduler as ConstantScheduler
from composer.optim._schedules import CosineAnnealingScheduler as CosineAnnealingScheduler
from composer.optim._schedules import CosineAnnealingWarmRestartsScheduler as CosineAnnealingWarmRestartsScheduler
from composer.optim._schedules import ExponentialScheduler as ExponentialScheduler
from composer.optim._schedules import LinearScheduler as LinearScheduler
from composer.optim._schedules import MultiStepScheduler as MultiStepScheduler
from composer.optim._schedules import PolynomialScheduler as PolynomialScheduler
from composer.optim._schedules import StepScheduler as StepScheduler
from composer.optim._time import _convert_time as _convert_time
from composer.optim._warmup import ConstantWithWarmupScheduler as ConstantWithWarmupScheduler
from composer.optim._warmup import CosineAnnealingWithWarmupScheduler as CosineAnnealingWithWarmupScheduler
from composer.optim._warmup import LinearWithWarmupScheduler as LinearWithWarmupScheduler
from composer.optim._warmup import MultiStepWithWarmupScheduler as MultiStepWithWarmupScheduler
from composer.optim._warmup import PolynomialWithWarmupScheduler as PolynomialWithWarmupScheduler

__all__ = [
    "ComposerScheduler",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "StepScheduler",
    "compile_composer_scheduler",
]
