"""The hidden matrices of a model: weights of its layers that are neither embeddings nor first or last layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from composer.utils.module_surgery import find_adapter_layers

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
        _matching(names, patterns, argument) for patterns, argument in ((include, "include"), (exclude, "exclude"))
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


def _matching(names: list[str], patterns: Sequence[str], argument: str) -> set[str]:
    check_patterns(**{argument: patterns})
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
    shape = matrix.parameter.shape
    rows, columns = shape[0], shape[1:].numel()
    if matrix.transposed:
        rows, columns = columns, rows
    count = len(matrix.blocks) if matrix.blocks is not None else matrix.groups
    return f"{count} of {rows // count} x {columns}" if count > 1 else f"{rows} x {columns}"
