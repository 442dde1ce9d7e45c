"""Learning rate schedules in training time, and optimizers with decoupled weight decay."""

from composer.optim.decoupled_weight_decay import DecoupledAdamW as DecoupledAdamW
from composer.optim.decoupled_weight_decay import DecoupledSGDW as DecoupledSGDW
from composer.optim.scheduler import ComposerScheduler as ComposerScheduler
from composer.optim.scheduler import ConstantScheduler as ConstantScheduler
from composer.optim.scheduler import ConstantWithWarmupScheduler as ConstantWithWarmupScheduler
from composer.optim.scheduler import CosineAnnealingScheduler as CosineAnnealingScheduler
from composer.optim.scheduler import CosineAnnealingWarmRestartsScheduler as CosineAnnealingWarmRestartsScheduler
from composer.optim.scheduler import CosineAnnealingWithWarmupScheduler as CosineAnnealingWithWarmupScheduler
from composer.optim.scheduler import ExponentialScheduler as ExponentialScheduler
from composer.optim.scheduler import GroupScheduler as GroupScheduler
from composer.optim.scheduler import LinearScheduler as LinearScheduler
from composer.optim.scheduler import LinearWithWarmupScheduler as LinearWithWarmupScheduler
from composer.optim.scheduler import MultiStepScheduler as MultiStepScheduler
from composer.optim.scheduler import MultiStepWithWarmupScheduler as MultiStepWithWarmupScheduler
from composer.optim.scheduler import PolynomialScheduler as PolynomialScheduler
from composer.optim.scheduler import PolynomialWithWarmupScheduler as PolynomialWithWarmupScheduler
from composer.optim.scheduler import StepScheduler as StepScheduler
from composer.optim.scheduler import WarmupStableDecayScheduler as WarmupStableDecayScheduler
from composer.optim.scheduler import compile_composer_scheduler as compile_composer_scheduler
from composer.optim.scheduler import scale_pytorch_scheduler as scale_pytorch_scheduler

__all__ = [
    "ComposerScheduler",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "DecoupledAdamW",
    "DecoupledSGDW",
    "ExponentialScheduler",
    "GroupScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "StepScheduler",
    "WarmupStableDecayScheduler",
    "compile_composer_scheduler",
    "scale_pytorch_scheduler",
]
