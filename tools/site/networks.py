"""Pictures of networks: their blocks in the order of the forward pass, with shapes and shares of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Any

import torch
from torch import nn

from composer import models
from composer.models import ComposerClassifier, ComposerModel, HuggingFaceModel

_ENOUGH = 6  # blocks; fewer are unfolded
_LONGEST = 4.5  # length of a bar, in the unit of the style sheet


@dataclass(frozen=True)
class Example:
    """A network to draw.

    Attributes:
        program: How it is constructed, as the picture says it.
        make: Constructs it.
        inputs: Shape of the input without the batch; (n,) for n tokens.
    """

    program: str
    make: Callable[[], ComposerModel]
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """A part of a network.

    Attributes:
        path: Its name in the wrapped network.
        kind: Its class.
        shape: Shape of what it returns, without the batch.
        parameters: The parameters that it has, and that no block before it has.
        count: How many of the same stand in a row, this one first.
        shared: True if blocks before it have all its parameters.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    count: int = 1
    shared: bool = False


def _perceptron() -> ComposerModel:
    return ComposerClassifier(nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)), 10)


def _llama() -> ComposerModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
    return HuggingFaceModel(LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_hidden_layers=8, **sizes)))


EXAMPLES: Mapping[str, Example] = {
    "ComposerClassifier": Example("a perceptron with 64 hidden units", _perceptron, (1, 28, 28)),
    "HuggingFaceModel": Example("a small Llama", _llama, (128,)),
    "UNet": Example("UNet()", models.UNet, (4, 192, 160)),
    "UNet3D": Example("UNet3D()", models.UNet3D, (4, 128, 128, 128)),
    "composer_deeplabv3": Example("composer_deeplabv3(150)", lambda: models.composer_deeplabv3(150), (3, 512, 512)),
    "composer_efficientnetb0": Example("composer_efficientnetb0()", models.composer_efficientnetb0, (3, 224, 224)),
    "composer_resnet": Example(
        'composer_resnet("resnet50")', lambda: models.composer_resnet("resnet50"), (3, 224, 224)
    ),
    "composer_resnet_cifar": Example(
        'composer_resnet_cifar("resnet_9")', lambda: models.composer_resnet_cifar("resnet_9"), (3, 32, 32)
    ),
    "composer_timm": Example(
        'composer_timm("convnext_atto")', lambda: models.composer_timm("convnext_atto"), (3, 224, 224)
    ),
    "create_bert_classification": Example(
        "create_bert_classification(2)", lambda: models.create_bert_classification(2), (128,)
    ),
    "create_bert_mlm": Example("create_bert_mlm()", models.create_bert_mlm, (128,)),
    "create_gpt2": Example("create_gpt2()", models.create_gpt2, (128,)),
    "mnist_model": Example("mnist_model()", models.mnist_model, (1, 28, 28)),
    "vit_small_patch16": Example("vit_small_patch16()", models.vit_small_patch16, (3, 224, 224)),
}
"""A network for each model of the packages."""


def picture(example: Example) -> str:
    """Return the picture of a network as HTML: one line for each block, with a bar for its parameters.

    Args:
        example: The network.
    """
    # Transformers reads values of masks, so its networks are real; the others have shapes only.
    with torch.device("cpu" if len(example.inputs) == 1 else "meta"):
        model = example.make()
    found = blocks(model, example.inputs)
    total = sum(parameter.numel() for parameter in model.parameters())
    most = max(block.parameters * block.count for block in found)
    lines = [f'<figure class="network"><b>{escape(example.program)}: {total:,} parameters</b>']
    lines.append(f"<div><code>input</code><i>{_text(example.inputs)}</i></div>")
    for block in found:
        own = block.parameters * block.count
        bar = f'<s style="width: {_LONGEST * own / most:.2f}rem"></s>{own:,}' if own else ""
        kind = f"{block.count} x {block.kind}" if block.count > 1 else block.kind
        lines.append(
            f"<div><code>{escape(block.path)}</code><span>{escape(kind)}</span><i>{_text(block.shape)}</i>"
            f"<u>{'shared' if block.shared else bar}</u></div>"
        )
    caption = "Each block with the shape of what it returns, and its parameters."
    if sum(block.parameters * block.count for block in found) < total:
        caption += " Layers that keep the shape and have less than 1 % of the parameters are not drawn."
    return "\n".join((*lines, f"<figcaption>{caption}</figcaption></figure>"))


def blocks(model: ComposerModel, inputs: tuple[int, ...]) -> list[Block]:
    """Return the blocks of a model in the order of its forward pass.

    Layers that keep the shape and have less than 1 % of the parameters, such as normalizations, are left out.

    Args:
        model: The model.
        inputs: Shape of the input without the batch; (n,) for n tokens.
    """
    network = next(module for module in model.children() if any(True for _ in module.parameters()))
    called: list[tuple[str, nn.Module, tuple[int, ...]]] = []
    names = {module: name for name, module in network.named_modules()}

    def note(module: nn.Module, _: Any, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor):
            called.append((names[module], module, tuple(outputs.shape[1:])))
        elif isinstance(outputs, Mapping | tuple) and module is not network:
            called.append((names[module], module, ()))

    hooks = [module.register_forward_hook(note) for module in names]
    device = next(network.parameters()).device
    with torch.no_grad():
        model.eval()(_batch(inputs, device))
    for hook in hooks:
        hook.remove()
    called = [each for each in called if each[1] is not network]
    level = _outermost(called)
    while len(_drawn(level, network, inputs)) < _ENOUGH:
        parts = [_outermost([each for each in called if each[0].startswith(f"{path}.")]) for path, _, _ in level]
        if not any(parts):
            break
        level = [each for one, inner in zip(level, parts, strict=True) for each in inner or [one]]
    return _joined(_drawn(level, network, inputs))


_Called = tuple[str, nn.Module, tuple[int, ...]]


def _outermost(called: list[_Called]) -> list[_Called]:
    """Return the modules that are in no other one of the list."""
    paths = {path for path, _, _ in called}
    return [each for each in called if not any(each[0].startswith(f"{path}.") for path in paths)]


def _drawn(level: list[_Called], network: nn.Module, inputs: tuple[int, ...]) -> list[Block]:
    total = sum(parameter.numel() for parameter in network.parameters())
    found, shape, seen = [], inputs, set[nn.Parameter]()
    for path, module, returned in level:
        all_of_it = list(module.parameters())
        own = [parameter for parameter in all_of_it if parameter not in seen]
        count = sum(parameter.numel() for parameter in own)
        if returned in (shape, ()) and count < total / 100 and not any(module.children()):
            continue
        seen.update(own)
        shared = bool(all_of_it) and not own
        found.append(Block(path, type(module).__name__, returned or shape, count, shared=shared))
        shape = returned or shape
    return found


def _joined(found: list[Block]) -> list[Block]:
    """Return blocks with equal ones in a row joined."""
    groups = (list(group) for _, group in groupby(found, lambda block: replace(block, path="")))
    return [replace(group[0], count=len(group)) for group in groups]


def _batch(inputs: tuple[int, ...], device: torch.device) -> Any:
    if len(inputs) == 1:
        tokens = torch.zeros(1, *inputs, dtype=torch.int64, device=device)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return torch.zeros(1, *inputs, device=device), None


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
