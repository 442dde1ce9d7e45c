"""The hidden matrices of a model: weights of its layers that are neither embeddings nor first or last layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from composer.utils.module_surgery import find_adapter_layers, has_own_state_dict

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Names of layers that compute several matrices at once, and the number of these.
_FUSED = {"c_attn": 3, "in_proj": 3, "in_proj_weight": 3, "qkv": 3, "qkv_proj": 3, "Wqkv": 3}
_GATED = {"gate_up_proj": 2, "Wi": 2}  # their output may have any width
_FUSED |= {"kv": 2, **_GATED}
# In layers with these names, the parts may be unequal, as with grouped queries, or interleaved by heads.
_UNKNOWN = {"c_attn", "kv", "qkv", "qkv_proj", "Wqkv", "query_key_value"}


@dataclass(frozen=True)
class HiddenMatrix:
    """A weight of a hidden layer, and how its matrices are stored.

    Attributes:
        parameter: The weight.
        blocks: The number of outputs of each matrix; None: a single matrix.
        transposed: The weight has the shape (inputs, outputs).
        groups: Groups of a convolution.
    """

    parameter: nn.Parameter
    blocks: tuple[int, ...] | None = None
    transposed: bool = False
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The number of outputs and of inputs of each matrix, which have one size."""
        outputs, inputs = self.parameter.shape[0], self.parameter.shape[1:].numel()
        if self.transposed:
            outputs, inputs = inputs, outputs
        return outputs // (len(self.blocks) if self.blocks else self.groups), inputs


@dataclass(frozen=True)
class HiddenMatrices:
    """The trainable parameters of a model, divided. Prints as a table.

    Attributes:
        matrices: The hidden matrices, by name.
        others: The other parameters, by name.
        reasons: Why a parameter of `others` is no hidden matrix, by name.
    """

    matrices: dict[str, HiddenMatrix] = field(default_factory=dict)
    others: dict[str, nn.Parameter] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def without(self, names: Iterable[str], reason: str) -> HiddenMatrices:
        """Return the split with some of the matrices among the other parameters.

        Args:
            names: Their names.
            reason: Why they are left out.
        """
        moved = {name: self.matrices[name].parameter for name in names}
        matrices = {name: matrix for name, matrix in self.matrices.items() if name not in moved}
        return HiddenMatrices(matrices, {**moved, **self.others}, {**self.reasons, **dict.fromkeys(moved, reason)})

    def __str__(self) -> str:
        rows = [(name, "hidden", _described(matrix)) for name, matrix in self.matrices.items()]
        rows += [(name, "other", self.reasons[name]) for name in self.others]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:{width}}  {owner:6}  {text}" for name, owner, text in rows)


def find_hidden_matrices(model: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> HiddenMatrices:
    """Divide the trainable parameters of a model: its hidden matrices, and all others.

    Hidden matrices are the weights of hidden linear layers and convolutions. The others are embeddings, the first and
    the last layer with weights, output embeddings, weights that are tied to another module, low-rank adapters,
    depthwise convolutions, matrices with a side below 4 or more than 128 times longer than wide, and all biases, norms
    and other parameters. Of several heads only the last counts as the last layer: name the others in `exclude`. Query,
    key and value in one weight are divided if its layer has one of the usual names and its parts are equal. If they are
    unequal or interleaved, as with grouped queries, the weight is one of the others.

    Args:
        model: The model, after all changes of its layers.
        include: Regular expressions; parameters whose name contains a match are hidden matrices. They must be
            matrices or weights of convolutions.
        exclude: Regular expressions; parameters whose name contains a match are none.

    Raises:
        TypeError: `include` or `exclude` is not a sequence of strings.
        ValueError: A regular expression is invalid or matches no trainable parameter, or `include` matches a parameter
            that is neither a matrix nor a weight of a convolution.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> print(find_hidden_matrices(model))
        2.weight  hidden  16 x 16
        0.weight  other   first layer
        0.bias    other   not a matrix
        2.bias    other   not a matrix
        4.weight  other   last layer
        4.bias    other   not a matrix
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    included, excluded = (
        match_names(names, patterns, argument) for patterns, argument in ((include, "include"), (exclude, "exclude"))
    )
    split = HiddenMatrices()
    found = {id(parameter): (matrix, reason) for parameter, matrix, reason in _layers(model)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix, reason = found.get(id(parameter), (None, "not the weight of a layer"))
        if parameter.dim() < 2:
            reason = "not a matrix"
            if name in included:
                raise ValueError(f"`include` must match matrices, but {name!r} has the shape {tuple(parameter.shape)}.")
        elif name in included:
            if matrix is None and parameter.dim() > 2:
                raise ValueError(
                    f"`include` must match matrices or weights of convolutions, but {name!r} has the shape "
                    f"{tuple(parameter.shape)}. Leave it out."
                )
            matrix, reason = matrix or HiddenMatrix(parameter), ""
        if name in excluded:
            reason = "excluded"
        if reason or matrix is None:
            split.others[name], split.reasons[name] = parameter, reason
        else:
            split.matrices[name] = matrix
    return split


_WITH_KNOWN_DECAY = (torch.optim.AdamW, torch.optim.SGD)


def take_hidden_matrices(
    split: HiddenMatrices,
    optimizers: Iterable[torch.optim.Optimizer],
    algorithm: str,
    lr: float | None = None,
    weight_decay: float | None = None,
) -> list[tuple[list[str], dict[str, Any]]]:
    """Remove the hidden matrices of a model from its optimizers, for an optimizer of their own.

    Args:
        split: The parameters of the model, divided.
        optimizers: The optimizers of the run. Their groups may be empty afterwards.
        algorithm: The class of the algorithm that takes them, for messages. `build_<algorithm>` makes its optimizers.
        lr: The learning rate of the matrices. None: that of their groups.
        weight_decay: Their weight decay, of which a step removes `lr * weight_decay`. None: that of their groups.

    Returns:
        For each group that had some of the matrices, their names, and its "lr", "weight_decay" and, if any, "name".

    Raises:
        ValueError: An optimizer cannot lose parameters, or defines weight decay in another way.
    """
    matrices = {id(matrix.parameter): name for name, matrix in split.matrices.items()}
    result: list[tuple[list[str], dict[str, Any]]] = []
    for optimizer in optimizers:
        taken = {id(p) for group in optimizer.param_groups for p in group["params"]} & matrices.keys()
        if not taken:
            continue
        kind = type(optimizer)
        if kind.__name__ in ("Muon", "SOAP"):  # of torch and of other libraries
            raise ValueError(
                f"`{algorithm}` must take parameters from another optimizer, but {kind.__module__}.{kind.__name__} "
                f"trains matrices of the model already. Leave out one of them."
            )
        if has_own_state_dict(optimizer):
            raise ValueError(
                f"`{algorithm}` must take parameters from an optimizer, but {kind.__name__} is a wrapper with a state "
                f"of its own. Make the optimizers with `build_{algorithm.lower()}` instead."
            )
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"`{algorithm}` must take parameters from an optimizer without modes, but {kind.__name__} has `train` "
                f"and `eval`: in evaluation its parameters would be averages, and those of `{algorithm}` not. Use "
                f"`torch.optim.AdamW`, or leave `{algorithm}` out."
            )
        for group in optimizer.param_groups:
            names = [matrices[id(p)] for p in group["params"] if id(p) in taken]
            decay = group.get("weight_decay", 0.0) if weight_decay is None else weight_decay
            if decay and weight_decay is None and kind not in _WITH_KNOWN_DECAY:
                raise ValueError(
                    f"`weight_decay` must be given to take parameters from {kind.__name__}, which may define weight "
                    f"decay in another way than `{algorithm}`, where a step removes `lr * weight_decay` of the "
                    f"weights; got a group with {decay!r}. That of `DecoupledAdamW` and `DecoupledSGDW` is equivalent "
                    f"if divided by the learning rate."
                )
            for parameter in group["params"]:
                if id(parameter) in taken:
                    optimizer.state.pop(parameter, None)
            group["params"][:] = [p for p in group["params"] if id(p) not in taken]
            group.pop("param_names", None)
            if names:
                named = {"name": group["name"]} if "name" in group else {}  # `GroupScheduler` looks for it
                result.append((names, {"lr": group["lr"] if lr is None else lr, "weight_decay": decay, **named}))
    return result


def check_schedulers_of_matrices(
    schedulers: Iterable[Any], optimizer: type[torch.optim.Optimizer], algorithm: str
) -> None:
    """Raise ValueError if there are schedulers, but none of them changes the rate of the hidden matrices.

    Args:
        schedulers: The schedulers of the run.
        optimizer: The class of the optimizer of the matrices, which may be wrapped, as by `SAM`.
        algorithm: The class of the algorithm that made it, for the message.
    """
    targets = [getattr(scheduler, "optimizer", None) for scheduler in schedulers]
    if targets and not any(isinstance(getattr(each, "base_optimizer", each), optimizer) for each in targets):
        names = ", ".join(type(target).__name__ for target in targets)
        raise ValueError(
            f"`schedulers` must change the learning rate of `{algorithm}` too, but they belong to {names}, the "
            f"optimizer of the other parameters. Use a schedule of `composer.optim`, compiled after INIT in a loop of "
            f"your own, or make the optimizers with `build_{algorithm.lower()}` and a scheduler for each."
        )


def check_patterns(**arguments: Any) -> None:
    """Raise TypeError if an argument is not a sequence of strings.

    Args:
        **arguments: The values by name.
    """
    for name, patterns in arguments.items():
        is_sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_sequence or not all(isinstance(pattern, str) for pattern in patterns):
            got = f"the string {patterns!r}" if isinstance(patterns, str) else repr(patterns)
            raise TypeError(
                f"`{name}` must be a sequence of regular expressions, got {got}. Pass a list of strings, such as "
                f"`{name}=['head']`."
            )


def match_names(names: Iterable[str], patterns: Sequence[str], argument: str) -> set[str]:
    """Return the names that contain a match of a pattern.

    Args:
        names: Names of trainable parameters.
        patterns: Regular expressions.
        argument: The name of the argument that has the patterns, for messages.

    Raises:
        TypeError: `patterns` is not a sequence of strings.
        ValueError: A pattern is no regular expression, or matches no name.
    """
    check_patterns(**{argument: patterns})
    names = list(names)
    matching: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"`{argument}` must hold regular expressions, got {pattern!r}: {error}.") from None
        if not found:
            raise ValueError(f"`{argument}` must match trainable parameters, but none contains {pattern!r}.")
        matching |= found
    return matching


def _layers(model: nn.Module) -> Iterator[tuple[nn.Parameter, HiddenMatrix | None, str]]:
    """Yield the weights of layers, how their matrices are stored, and why they are none."""
    adapters = find_adapter_layers(model)
    named = [(name, module) for name, module in model.named_modules() if _weights_of(module)]
    ends = {id(named[0][1]): "first layer", id(named[-1][1]): "last layer"} if named else {}
    for module in model.modules():
        outputs = getattr(module, "get_output_embeddings", None)
        if callable(outputs) and isinstance(head := outputs(), nn.Module):
            ends[id(head)] = "output embeddings"
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for name, module in named:
        for suffix, weight in _weights_of(module).items():
            matrix, reason = _matrix(module, weight, name if suffix == "weight" else suffix)
            if owners[id(weight)] > 1:
                reason = "tied"
            elif id(module) in ends:
                reason = reason or ends[id(module)]
            elif module in adapters and any(parameter.requires_grad for parameter in module.parameters()):
                reason = reason or "low-rank adapter"
            yield weight, matrix, reason


def _weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a linear layer, convolution or embedding by attribute; of other modules none."""
    if isinstance(module, nn.MultiheadAttention):
        names: tuple[str, ...] = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    elif isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag, *_CONVS)) or _is_conv1d(module):
        names = ("weight",)
    else:
        return {}
    if is_parametrized(module):  # the weight is computed from another one, such as a standardized weight
        lists: Any = module.parametrizations
        found = {name: getattr(steps, "original", None) for name, steps in lists.items()}
    else:
        found = dict(module._parameters)
    return {name: weight for name in names if isinstance(weight := found.get(name), nn.Parameter)}


def _is_conv1d(module: nn.Module) -> bool:
    # The linear layer of transformers with a weight of shape (inputs, outputs), for GPT-2.
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def _matrix(module: nn.Module, weight: nn.Parameter, name: str) -> tuple[HiddenMatrix | None, str]:
    """Return how the matrices of a weight are stored, and the reason if it is none."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None, "embedding"
    groups, transposed = getattr(module, "groups", 1), _is_conv1d(module)
    rows, columns = weight.shape[0] // groups, weight[0].numel()
    if transposed:
        rows, columns = columns, rows
    if groups > 1 and (rows == 1 or weight.shape[1] == 1):
        return None, "depthwise"
    last = name.rpartition(".")[2]
    parts = _FUSED.get(last, 1)
    outputs = weight.shape[1] if transposed else weight.shape[0]
    inputs = weight.shape[0] if transposed else columns
    is_fused = parts > 1 and outputs % parts == 0 and (last in _GATED or outputs == parts * inputs)
    if last in _UNKNOWN and not is_fused and outputs > inputs:
        return None, "several matrices of unknown parts"
    blocks = (outputs // parts,) * parts if is_fused else None
    short, long = sorted((rows if blocks is None else blocks[0], columns))
    if short < 4:
        return None, "a side below 4"
    if long > 128 * short:
        return None, "long and narrow"
    return HiddenMatrix(weight, blocks, transposed, groups), ""


def _described(matrix: HiddenMatrix) -> str:
    rows, columns = matrix.shape
    count = len(matrix.blocks) if matrix.blocks else matrix.groups
    return f"{count} of {rows} x {columns}" if count > 1 else f"{rows} x {columns}"
