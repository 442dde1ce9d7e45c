"""NaN and infinity are refused, at construction and by name, by every number that anything of this repository takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from composer import optim
from composer.core._registry import points

NAN, INF = float("nan"), float("inf")

REQUIRED: dict[str, Any] = {
    "Alibi": {"max_sequence_length": 8},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "SqueezeExcite2d": {"num_features": 8},
    "SqueezeExciteConv2d": {"in_channels": 8, "out_channels": 8, "kernel_size": 3},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck"},
    "EarlyStopper": {"monitor": "loss", "dataloader_label": "eval"},
    "Generate": {"prompts": ["a"], "interval": "1ba"},
    "ThresholdStopper": {"monitor": "loss", "dataloader_label": "eval", "threshold": 0.5},
    "MLPerfCallback": {"root_folder": "/nowhere", "index": 0},
    "ConstantWithWarmupScheduler": {"t_warmup": "1ba"},
    "CosineAnnealingWarmRestartsScheduler": {"t_0": "1ba"},
    "CosineAnnealingWithWarmupScheduler": {"t_warmup": "1ba"},
    "ExponentialScheduler": {"gamma": 0.9},
    "LinearWithWarmupScheduler": {"t_warmup": "1ba"},
    "MultiStepScheduler": {"milestones": ["1ba"]},
    "MultiStepWithWarmupScheduler": {"t_warmup": "1ba", "milestones": ["2ba"]},
    "PolynomialScheduler": {"power": 2.0},
    "PolynomialWithWarmupScheduler": {"t_warmup": "1ba"},
    "StepScheduler": {"step_size": "1ba"},
    "DecoupledSGDW": {"lr": 0.1},
}
# (class, argument): values that mean what they say.
MEANT: dict[tuple[str, str], tuple[float, ...]] = {
    ("GradientClipping", "clipping_threshold"): (INF,),  # clips nothing
}


def classes() -> Iterator[type]:
    for group in ("composer.algorithms", "composer.callbacks"):
        for name in sorted(points(group)):
            found = points(group)[name].load()
            if isinstance(found, type):
                yield found
    for name in optim.__all__:
        found = getattr(optim, name)
        if isinstance(found, type) and found is not optim.ComposerScheduler:
            yield found


def cases() -> Iterator[Any]:
    for cls in classes():
        for name, parameter in inspect.signature(cls).parameters.items():
            kinds = str(parameter.annotation)
            for value in (NAN, INF, -INF):
                meant = value in MEANT.get((cls.__name__, name), ())
                if any(kind in kinds for kind in ("float", "int", "Time")) and not meant:
                    yield pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{value}")


def make(cls: type, name: str, value: Any) -> Any:
    given = (value, 0.9) if name == "betas" else [value] if name == "milestones" else value
    arguments = {**REQUIRED.get(cls.__name__, {}), name: given}
    if issubclass(cls, torch.optim.Optimizer):
        arguments["params"] = [torch.nn.Parameter(torch.zeros(1))]
    return cls(**arguments)


@pytest.mark.parametrize(("cls", "name", "value"), list(cases()))
def test_a_number_that_is_none_is_refused_at_construction(cls: type, name: str, value: float) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"`{name}`"):
        make(cls, name, value)
