"""Check every method that replaces layers on networks of timm, which were written without Composer in mind.

    python -m tools.check_surgeries [network of timm ...]

For each pair of a network and a method: modules that are not replaced stay the same objects, and so do parameters;
replaced layers compute what a direct computation gives; an optimizer with two parameter groups, made before, holds all
parameters; a training step has finite gradients; the state dict can be loaded into another changed model; copies made
by `deepcopy` and `pickle` give the same outputs.
"""

from __future__ import annotations

import copy
import pickle
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
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

# Networks of different families, with arguments that make them small. "size" is the height and width of the images.
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet26d": {},
    "nf_resnet50": {},
    "tf_efficientnet_lite0": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1, 1, 1), "size": 56, "window_size": 7},
    "mixer_s32_224": {"img_size": 64},
    "regnetx_002": {},
    "densenet121": {},
    "dla34": {},
    "res2net50_26w_4s": {},
    "resnest14d": {},
    "ghostnet_100": {},
    "hrnet_w18_small": {},
    "repvgg_a0": {},
    "xcit_nano_12_p16_224": {"depth": 2},
    "coat_lite_tiny": {"img_size": 64},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    "levit_128s": {"size": 224},
    "bat_resnext26ts": {"size": 256},
    "botnet26t_256": {"img_size": 64},
    "gernet_s": {},
    "eca_resnet33ts": {},
    "resnetv2_50x1_bit": {},
    "inception_v3": {"size": 96},
}


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


@dataclass
class Outcome:
    """Result of applying a method to a network.

    Attributes:
        replaced: The number of layers of each type that were replaced or have another weight.
        kept: The warnings about layers that were not replaced, and about networks without a matching layer.
        problems: One sentence for each problem.
        overflows: True if an evaluation gives infinities or NaN: standardized weights overflow while the running
            statistics are untrained. Copies must then give the same ones.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    overflows: bool = False


def make(network: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network with random weights, the same in every call, and images for two batches."""
    import timm  # type: ignore[import-untyped,unused-ignore]

    options = dict(NETWORKS.get(network, {}))
    size = options.pop("size", 64)
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(network, pretrained=False, num_classes=5, **options)
    return model, torch.randn(4, 3, size, size)


def check(network: str, method: str) -> Outcome:
    """Apply a method to a network and compare the result with the original."""
    outcome = Outcome()
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
    outcome.kept = [str(warning.message) for warning in caught]
    changed = _find_changed(model, original, modules)
    outcome.replaced = Counter(type(layer).__name__ for layer in changed.values())

    _check_identity(outcome, model, modules, params, changed, optimizer, keeps=method != "Factorize")
    _check_outputs(outcome, original, model, images, changed)
    _check_step(outcome, model, images, optimizer)
    _check_copies(outcome, network, method, model, images)
    if (
        not changed
        and method not in ("ChannelsLast", "WeightStandardization")
        and not any(w.category is NoEffectWarning for w in caught)
    ):
        outcome.problems.append("nothing was replaced without a `NoEffectWarning`")
    return outcome


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
    outcome: Outcome,
    model: nn.Module,
    modules: dict[str, nn.Module],
    params: list[nn.Parameter],
    changed: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    keeps: bool,
) -> None:
    after = set(model.modules())
    lost = [name for name, module in modules.items() if name not in changed and module not in after]
    outcome.problems += [f"`{name}` was not replaced, but is another object" for name in lost]
    trained = {p for p in model.parameters() if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if len(held) != len(set(held)) or trained != set(held):
        outcome.problems.append("the optimizer does not hold each parameter once")
    if keeps and not set(params) <= set(model.parameters()):
        outcome.problems.append("parameters that should stay were replaced")
    groups = [{p.dim() > 1 for p in group["params"]} for group in optimizer.param_groups]
    if not all(kinds <= {expected} for kinds, expected in zip(groups, (True, False), strict=True)):
        outcome.problems.append("the groups mix weights with biases")


def _check_outputs(
    outcome: Outcome, original: nn.Module, model: nn.Module, images: torch.Tensor, changed: dict[str, nn.Module]
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
    outcome.overflows = not bool(torch.isfinite(output).all())
    if outcome.overflows and not standardized:
        outcome.problems.append("outputs are not finite")
    if not changed:
        torch.testing.assert_close(_eval(original, images), output, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        for name, layer in changed.items():
            if name not in inputs:
                continue  # the network reads it without calling it, or not at all
            expected, actual = reference(original.get_submodule(name).eval(), layer, inputs[name]), layer(inputs[name])
            if expected.shape != actual.shape or (expected - actual).abs().max() > 1e-4 * expected.abs().max():
                outcome.problems.append(f"`{name}` ({type(layer).__name__}) does not compute what it should")


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


def _check_step(outcome: Outcome, model: nn.Module, images: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    model(images).float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads or not all(torch.isfinite(grad).all() for grad in grads):
        outcome.problems.append("gradients are not finite")
    optimizer.step()
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        outcome.problems.append("weights are not finite after a step")


def _check_copies(outcome: Outcome, network: str, method: str, model: nn.Module, images: torch.Tensor) -> None:
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
            outcome.problems.append(f"a copy by {way} gives other outputs")


def _is_same(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Return True if tensors are equal, including the positions of infinities and NaN."""
    return torch.equal(expected.isnan(), actual.isnan()) and torch.equal(expected.nan_to_num(), actual.nan_to_num())


@torch.no_grad()
def _eval(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    output: torch.Tensor = model.eval()(images)
    return output


def main(names: list[str]) -> int:
    """Check networks, all unless named, and print a line for each pair, then totals for each method."""
    totals: dict[str, Counter[str]] = {method: Counter() for method in METHODS}
    failed = 0
    for network in names or NETWORKS:
        start = time.perf_counter()
        for method in METHODS:
            try:
                outcome = check(network, method)
                problems = outcome.problems
            except Exception as error:  # noqa: BLE001  # one pair must not end the others
                outcome, problems = Outcome(), [f"{type(error).__name__}: {error}"]
            if method in IDLE and not check_idle(network, method):
                problems.append("outputs change although nothing matches")
            state = "failed" if problems else "replaced" if outcome.replaced else "nothing to replace"
            if method == "ChannelsLast" and not problems:
                state = "replaced"
            totals[method][state] += 1
            totals[method]["with layers left by a warning"] += any("left" in text for text in outcome.kept)
            failed += bool(problems)
            print(f"{network} + {method}: {state} {dict(outcome.replaced)}{' (outputs overflow)' * outcome.overflows}")
            for line in [*problems, *(text for text in outcome.kept if "left" in text)]:
                print(f"    {line}")
        print(f"{network}: {time.perf_counter() - start:.1f} s", flush=True)
    for method, counts in totals.items():
        print(method, dict(counts))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
