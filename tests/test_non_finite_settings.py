"""Infinity and NaN are rejected at construction and by name, by every class of this repository that takes a number.

Numbers of NumPy are numbers, and are kept as plain ones.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from composer import optim
from composer.core import Algorithm, Callback
from composer.core._registry import points

NAN, INF = float("nan"), float("inf")

REQUIRED: dict[str, Any] = {
    "GroupScheduler": {"scheduler": optim.ConstantScheduler()},
    "Alibi": {"max_sequence_length": 8},
    "BatchSizeWarmup": {"initial_batch_size": 2},
    "Distillation": {"teacher": torch.nn.Identity()},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "SequencePacking": {"length": 16},
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
    "WarmupStableDecayScheduler": {"t_warmup": "1ba"},
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
                if any(kind in kinds for kind in ("float", "int", "SupportsIndex", "Time")) and not meant:
                    yield pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{value}")


def make(cls: type, name: str, value: Any) -> Any:
    given = (value, 0.9) if name == "betas" else [value] if name == "milestones" else value
    arguments = {**REQUIRED.get(cls.__name__, {}), name: given}
    if (cls.__name__, name) == ("EMA", "smoothing"):
        arguments["half_life"] = None
    if issubclass(cls, torch.optim.Optimizer):
        arguments["params"] = [torch.nn.Parameter(torch.zeros(1))]
    return cls(**arguments)


@pytest.mark.parametrize(("cls", "name", "value"), list(cases()))
def test_a_number_that_is_none_is_refused_at_construction(cls: type, name: str, value: float) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"`{name}`"):
        make(cls, name, value)


def typed_cases() -> Iterator[Any]:
    for cls in classes():
        group = cls.__module__.split(".")[1]
        if group not in ("algorithms", "optim") or issubclass(cls, torch.optim.Optimizer):
            continue
        for name, parameter in inspect.signature(cls).parameters.items():
            kinds = {kind.strip() for kind in str(parameter.annotation).split("|")}
            wrong: list[Any] = []
            if kinds & {"int", "float"} and "str" not in kinds:
                wrong = ["x", True, *([] if "None" in kinds else [None]), *([1.5] if kinds == {"int"} else [])]
            elif kinds == {"bool"}:
                wrong = ["no", 2]
            yield from (pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{value}") for value in wrong)


@pytest.mark.parametrize(("cls", "name", "value"), list(typed_cases()))
def test_a_value_of_the_wrong_type_is_refused_by_name(cls: type, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"`{name}` must be"):
        make(cls, name, value)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        ("GradientClipping", "clipping_threshold", 0),
        ("EMA", "half_life", "0ba"),
        ("BlurPool", "min_channels", -1),
        ("SqueezeExcite", "min_channels", -1),
        ("Factorize", "min_features", -1),
        ("SWA", "swa_start", None),
        ("CosineAnnealingScheduler", "t_max", "-1ep"),
        ("CosineAnnealingScheduler", "t_max", "0ep"),
        ("CosineAnnealingScheduler", "alpha_f", -0.1),
        ("ConstantScheduler", "alpha", -1),
        ("LinearScheduler", "alpha_i", -1),
        ("MultiStepScheduler", "milestones", "-1ep"),
        ("MultiStepScheduler", "gamma", -0.1),
        ("StepScheduler", "step_size", "0ba"),
        ("ExponentialScheduler", "gamma", -0.1),
        ("LinearWithWarmupScheduler", "t_warmup", "-1ba"),
        ("CosineAnnealingWarmRestartsScheduler", "t_mult", 0),
        ("PolynomialScheduler", "power", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(cls: str, name: str, value: Any) -> None:
    found = next(found for found in classes() if found.__name__ == cls)
    with pytest.raises((ValueError, TypeError), match=rf"`{name}`"):
        make(found, name, value)


def numpy_cases() -> Iterator[Any]:
    """Each algorithm and callback with numbers, and those of its arguments that are numbers."""
    for cls in classes():
        defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        given = {**defaults, **REQUIRED.get(cls.__name__, {})}
        numbers = {name: value for name, value in given.items() if type(value) in (int, float) and name[-4:] != "_key"}
        if numbers and issubclass(cls, (Algorithm, Callback)):
            yield pytest.param(cls, numbers, id=cls.__name__)


def numbers_of_numpy(value: Any) -> list[Any]:
    if isinstance(value, np.generic):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for item in inner for found in numbers_of_numpy(item)]


@pytest.mark.parametrize(("cls", "numbers"), list(numpy_cases()))
def test_numbers_of_numpy_are_taken_and_kept_as_plain_ones(cls: type, numbers: dict[str, Any]) -> None:
    if cls.__name__ == "MLPerfCallback":
        pytest.importorskip("mlperf_logging", reason="MLPerfCallback needs it")
    as_numpy = {name: (np.int32 if type(value) is int else np.float64)(value) for name, value in numbers.items()}
    plain, made = (cls(**{**REQUIRED.get(cls.__name__, {}), **given}) for given in (numbers, as_numpy))

    assert numbers_of_numpy(vars(made)) == []
    if isinstance(made, Algorithm):
        assert repr(made) == repr(plain)  # from which a checkpoint rebuilds it
    saved = io.BytesIO()
    torch.save(made.state_dict(), saved)
    saved.seek(0)
    torch.load(saved, weights_only=True)
