"""Check what a method that replaces layers does to networks of timm, which were written without Composer in mind.

Modules that are not replaced stay the same objects, and so do parameters; replaced layers compute what a direct
computation gives; an optimizer with two parameter groups, made before, holds all parameters; a training step has finite
gradients; the state dict can be loaded into another changed model; copies made by `deepcopy` and `pickle` give the same
outputs.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from composer import functional as cf
from composer.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, blur_2d
from composer.algorithms.factorize import FactorizedConv2d, FactorizedLinear
from composer.algorithms.squeeze_excite import SqueezeExciteConv2d
from composer.algorithms.warnings import NoEffectWarning
from composer.algorithms.weight_standardization import WeightStandardizer


def apply_low_precision_layernorm(model: nn.Module, optimizers: torch.optim.Optimizer) -> None:
    cf.apply_low_precision_layernorm(model, "amp_bf16", optimizers)


def apply_low_precision_groupnorm(model: nn.Module, optimizers: torch.optim.Optimizer) -> None:
    cf.apply_low_precision_groupnorm(model, "amp_bf16", optimizers)


def blur_last(model: nn.Module, optimizers: torch.optim.Optimizer) -> None:
    cf.apply_blurpool(model, blur_first=False, optimizers=optimizers)


METHODS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "BlurPool": lambda model, optimizer: cf.apply_blurpool(model, optimizers=optimizer),
    "BlurPool(blur_first=False)": blur_last,
    "Factorize": lambda model, optimizer: cf.apply_factorization(
        model, min_channels=64, min_features=64, optimizers=optimizer
    ),
    "SqueezeExcite": lambda model, optimizer: cf.apply_squeeze_excite(model, 4, 32, optimizers=optimizer),
    "GhostBatchNorm": lambda model, optimizer: cf.apply_ghost_batchnorm(model, 2, optimizers=optimizer),
    "WeightStandardization": lambda model, optimizer: cf.apply_weight_standardization(model, 1),
    "LowPrecisionLayerNorm": apply_low_precision_layernorm,
    "LowPrecisionGroupNorm": apply_low_precision_groupnorm,
    "FusedLayerNorm": cf.apply_fused_layernorm,
    "ChannelsLast": lambda model, optimizer: cf.apply_channels_last(model),
}
# With these arguments nothing is replaced.
IDLE: dict[str, Callable[[nn.Module], object]] = {
    "BlurPool": lambda model: cf.apply_blurpool(model, replace_maxpools=False, min_channels=10**6),
    "Factorize": lambda model: cf.apply_factorization(model, min_channels=10**6, min_features=10**6),
    "SqueezeExcite": lambda model: cf.apply_squeeze_excite(model, 4, 10**6),
}
LAYERS = (nn.Conv2d, nn.MaxPool2d, nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)


def make(network: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network with random weights, the same in every call, and images for two batches."""
    import timm  # type: ignore[import-untyped,unused-ignore]

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(network, pretrained=False, num_classes=5)
    return model, torch.randn(4, 3, 64, 64)


def check(network: str, method: str) -> list[str]:
    """Apply a method to a network; return a sentence for each problem of the result."""
    problems: list[str] = []
    original, images = make(network)
    model = copy.deepcopy(original)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() <= 1]}], lr=1e-4
    )
    modules = dict(model.named_modules())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        METHODS[method](model, optimizer)
    changed = _find_changed(model, original, modules)

    _check_identity(problems, model, modules, params, changed, optimizer, keeps=method != "Factorize")
    _check_outputs(problems, original, model, images, changed)
    _check_step(problems, model, images, optimizer)
    _check_copies(problems, network, method, model, images)
    if (
        not changed
        and method not in ("ChannelsLast", "WeightStandardization")
        and not any(w.category is NoEffectWarning for w in caught)
    ):
        problems.append("nothing was replaced without a `NoEffectWarning`")
    return problems


def check_idle(network: str, method: str) -> bool:
    """Return True if a method that matches no layer leaves the outputs bit-identical."""
    original, images = make(network)
    model = copy.deepcopy(original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        IDLE[method](model)
    return torch.equal(_eval(original, images), _eval(model, images))


def _find_changed(model: nn.Module, original: nn.Module, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers that replaced others, or have another weight, by name."""
    changed = {}
    for name, module in model.named_modules():
        if name in modules and isinstance(original.get_submodule(name), LAYERS):
            steps: Any = getattr(module, "parametrizations", {})
            standardized = "weight" in steps and isinstance(steps.weight[-1], WeightStandardizer)
            if module is not modules[name] or standardized:
                changed[name] = module
    return changed


def _check_identity(
    problems: list[str],
    model: nn.Module,
    modules: dict[str, nn.Module],
    params: list[nn.Parameter],
    changed: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    keeps: bool,
) -> None:
    after = set(model.modules())
    lost = [name for name, module in modules.items() if name not in changed and module not in after]
    problems += [f"`{name}` was not replaced, but is another object" for name in lost]
    trained = {p for p in model.parameters() if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if len(held) != len(set(held)) or trained != set(held):
        problems.append("the optimizer does not hold each parameter once")
    if keeps and not set(params) <= set(model.parameters()):
        problems.append("parameters that should stay were replaced")
    groups = [{p.dim() > 1 for p in group["params"]} for group in optimizer.param_groups]
    if not all(kinds <= {expected} for kinds, expected in zip(groups, (True, False), strict=True)):
        problems.append("the groups mix weights with biases")


def _check_outputs(
    problems: list[str], original: nn.Module, model: nn.Module, images: torch.Tensor, changed: dict[str, nn.Module]
) -> None:
    inputs: dict[str, torch.Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, args[0].detach().clone()))
        for name, layer in changed.items()
    ]
    output = _eval(model, images)
    for handle in handles:
        handle.remove()
    standardized = any("parametrizations" in layer._modules for layer in changed.values())
    if not torch.isfinite(output).all() and not standardized:
        problems.append("outputs are not finite")
    if not changed:
        torch.testing.assert_close(_eval(original, images), output, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        for name, layer in changed.items():
            if name not in inputs:
                continue  # the network reads it without calling it, or not at all
            expected, actual = reference(original.get_submodule(name).eval(), layer, inputs[name]), layer(inputs[name])
            if expected.shape != actual.shape or (expected - actual).abs().max() > 1e-4 * expected.abs().max():
                problems.append(f"`{name}` ({type(layer).__name__}) does not compute what it should")


def reference(old: nn.Module, new: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the expected output of a replacement in evaluation mode; `old` is a copy of the replaced layer."""
    output: torch.Tensor
    if isinstance(new, BlurConv2d):
        if new.blur_first:
            return old(blur_2d(x))  # type: ignore[no-any-return]
        stride, old.stride = old.stride, (1, 1)  # type: ignore[assignment]
        output = blur_2d(old(x), stride=stride)  # type: ignore[arg-type]
        old.stride = stride
        return output
    if isinstance(new, BlurMaxPool2d):
        pool: Any = old
        pooled = F.max_pool2d(x, pool.kernel_size, 1, pool.padding, pool.dilation)
        return blur_2d(pooled, stride=pool.stride) if not pool.ceil_mode else new(x)
    if isinstance(new, SqueezeExciteConv2d):
        output, mlp = old(x), new.se.pool_and_mlp
        means = output.mean((2, 3))
        return output * torch.sigmoid(mlp[4](torch.relu(mlp[2](means))))[..., None, None]
    if isinstance(new, FactorizedConv2d | FactorizedLinear):
        return new.module1(new.module0(x)).reshape(old(x).shape)  # type: ignore[no-any-return]
    if "parametrizations" in new._modules:
        layer: Any = copy.deepcopy(old)
        flat = layer.weight.flatten(1)
        standard = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + 1e-10).sqrt()
        layer.weight.copy_(standard.view_as(layer.weight))
        return layer(x)  # type: ignore[no-any-return]
    return old(x)  # type: ignore[no-any-return]


def _check_step(problems: list[str], model: nn.Module, images: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    model(images).float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads or not all(torch.isfinite(grad).all() for grad in grads):
        problems.append("gradients are not finite")
    optimizer.step()
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        problems.append("weights are not finite after a step")


def _check_copies(problems: list[str], network: str, method: str, model: nn.Module, images: torch.Tensor) -> None:
    expected = _eval(model, images)
    loaded, _ = make(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        METHODS[method](loaded, torch.optim.SGD(loaded.parameters(), lr=0.1))
    loaded.load_state_dict(model.state_dict())
    copies = {"load_state_dict": loaded, "deepcopy": copy.deepcopy(model)}
    if method != "WeightStandardization":  # torch does not pickle parametrized modules
        copies["pickle"] = pickle.loads(pickle.dumps(model))  # made in the same expression
    for way, other in copies.items():
        if not _is_same(expected, _eval(other, images)):
            problems.append(f"a copy by {way} gives other outputs")


def _is_same(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Return True if tensors are equal, including the positions of infinities and NaN."""
    return torch.equal(expected.isnan(), actual.isnan()) and torch.equal(expected.nan_to_num(), actual.nan_to_num())


@torch.no_grad()
def _eval(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    output: torch.Tensor = model.eval()(images)
    return output
