"""The namespace with all packages installed."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import composer.functional
from composer import algorithms
from composer.core import Algorithm
from composer.testing import HostProblem

CLASSES = (
    "Alibi AugMix BlurPool ChannelsLast ColOut CutMix CutOut EMA Factorize FusedLayerNorm GatedLinearUnits "
    "GhostBatchNorm GradientClipping GyroDropout LabelSmoothing LayerFreezing LowPrecisionGroupNorm "
    "LowPrecisionLayerNorm MixUp NoOpModel ProgressiveResizing RandAugment SAM SWA ScaleSchedule SelectiveBackprop "
    "SeqLengthWarmup SqueezeExcite StochasticDepth WeightStandardization"
).split()
HELPERS = ("AugmentAndMixTransform ColOutTransform RandAugmentTransform SqueezeExcite2d SqueezeExciteConv2d").split()
FUNCTIONS = (
    "apply_alibi augmix_image apply_blurpool apply_channels_last colout_batch compute_ema cutmix_batch cutout_batch "
    "apply_factorization apply_gated_linear_units apply_ghost_batchnorm apply_gradient_clipping "
    "apply_low_precision_layernorm apply_low_precision_groupnorm smooth_labels freeze_layers mixup_batch resize_batch "
    "randaugment_image should_selective_backprop select_using_loss set_batch_sequence_length apply_squeeze_excite "
    "apply_stochastic_depth apply_weight_standardization apply_gyro_dropout"
).split()
NOTEBOOK_FUNCTIONS = "apply_fused_layernorm apply_se cutmix randaugment resize_inputs scale_scheduler".split()


def test_a_star_import_gives_every_class() -> None:
    names: dict[str, object] = {}
    exec("from composer.algorithms import *", names)  # noqa: S102  # not allowed inside a function

    classes = {name: thing for name, thing in names.items() if inspect.isclass(thing)}
    assert set(CLASSES) <= {name for name, cls in classes.items() if issubclass(cls, Algorithm)}
    assert set(HELPERS) <= set(classes)


def test_all_functions_are_listed() -> None:
    assert set(FUNCTIONS + NOTEBOOK_FUNCTIONS) <= set(dir(composer.functional))


def test_everything_listed_can_be_had() -> None:
    for namespace in (algorithms, composer.functional):
        for name in namespace.__all__:
            assert callable(getattr(namespace, name))


def test_no_name_hides_the_module_that_an_algorithm_lives_in() -> None:
    for name in algorithms.__all__:
        package = getattr(algorithms, name).__module__.split(".")[2]
        module = importlib.import_module(f"composer.algorithms.{package}.{package}")

        assert getattr(importlib.import_module(f"composer.algorithms.{package}"), package) is module


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_methods_of_several_packages_train_together_on_a_gpu() -> None:
    methods = [algorithms.MixUp(), algorithms.LabelSmoothing(), algorithms.SAM(), algorithms.EMA(half_life="2ba")]
    weights = HostProblem.train(methods, device="gpu", precision="amp_bf16")

    assert {value.device.type for value in weights.values()} == {"cuda"}
    assert all(value.isfinite().all() for value in weights.values())
