"""Surgery on graphs of `torch.fx`: count and replace operations, fuse layers, skip residual blocks at random."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer.utils.iter_helpers import ensure_tuple
from composer.utils.numbers import check_finite

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

Op = Callable[..., Any] | str | type[nn.Module]
"""A function, the name of a method of tensors, or a class of modules."""

_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_PROJECTIONS: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Identity,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
)  # fmt: skip


def count_op_instances(gm: GraphModule, ops: Op | Sequence[Op]) -> int:
    """Count the nodes of a graph that call any of some operations.

    Args:
        gm: The graph.
        ops: One operation or several: functions, names of methods of tensors, or classes of modules (with their
            subclasses).

    Raises:
        ValueError: `gm` is not a `GraphModule`.
        TypeError: An operation is none of these.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> gm = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
        >>> count_op_instances(gm, nn.Linear), count_op_instances(gm, [nn.ReLU, torch.relu])
        (2, 1)
    """
    return len(_calls_of(gm, ops))


def replace_op(gm: GraphModule, src_ops: Op | Sequence[Op], tgt_op: Callable[..., Any]) -> GraphModule:
    """Replace calls of some operations by calls of a function, which gets the same arguments. Changes `gm` in place.

    Args:
        gm: The graph.
        src_ops: What to replace, as for `count_op_instances`. Modules that are no longer called are removed.
        tgt_op: The function.

    Returns:
        `gm`.

    Raises:
        ValueError: `gm` is not a `GraphModule`.
        TypeError: `tgt_op` is not a function, or an operation in `src_ops` is of no known kind.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> gm = replace_op(symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), nn.ReLU, torch.tanh)
        >>> gm(torch.zeros(1, 2)).abs().max() < 1
        tensor(True)
    """
    if isinstance(tgt_op, str | type | nn.Module):
        raise TypeError(
            f"`tgt_op` must be a function of the arguments of the operations it replaces, got {tgt_op!r}. To replace "
            f"modules by modules, use `composer.utils.module_surgery.replace_module_classes`."
        )
    replaced = _calls_of(gm, src_ops)
    for node in replaced:
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(tgt_op, node.args, node.kwargs)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    _finish(gm, replaced)
    return gm


def fuse_parallel_linears(gm: GraphModule, keep_weights: bool = False) -> GraphModule:
    """Fuse linear layers with the same input into one, whose output is split. Changes `gm` in place.

    The layers of an input are fused into `fused_linear_<i>` if all of them have a bias or none has, and if they have
    the same dtype and device. Layers that are used elsewhere too, or share a parameter with another module, stay as
    they are. The parameters are new, so create optimizers afterwards.

    Args:
        gm: The graph.
        keep_weights: The fused layer computes what its parts did; layers of which only some are trainable are then not
            fused. False: it is newly initialized.

    Returns:
        `gm`.

    Raises:
        ValueError: `gm` is not a `GraphModule`.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> class Attention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        ...
        ...     def forward(self, x):
        ...         return self.q(x) @ self.k(x).mT @ self.v(x)
        >>> gm = fuse_parallel_linears(symbolic_trace(Attention()), keep_weights=True)
        >>> count_op_instances(gm, nn.Linear), gm.fused_linear_0
        (1, Linear(in_features=4, out_features=12, bias=True))
    """
    _check_graph(gm)
    owners = Counter(parameter for module in gm.modules() for parameter in module._parameters.values())
    calls = [node.target for node in gm.graph.nodes if node.op == "call_module"]
    modules = dict(gm.named_modules())
    fused: list[Node] = []
    for node in list(gm.graph.nodes):
        parts = [
            user
            for user in sorted(node.users, key=_order(gm.graph))
            if user.op == "call_module"
            and type(modules[user.target]) is nn.Linear
            and calls.count(user.target) == 1
            and all(owners[p] == 1 for p in modules[user.target].parameters())
        ]
        layers = [modules[part.target] for part in parts]
        if len(layers) > 1 and _can_fuse(layers, keep_weights):
            _fuse(gm, node, parts, layers, keep_weights)
            fused += parts
    _finish(gm, fused)
    return gm


def apply_stochastic_residual(gm: GraphModule, drop_rate: float = 0.2) -> tuple[GraphModule, int]:
    """Skip residual blocks at random in training. Changes `gm` in place.

    A residual block is an addition of `f(x)` and a shortcut, in any order. The shortcut is x or a projection of it by
    convolutions, linear layers, normalizations and poolings; `f` has layers with parameters and is longer than the
    projection. Its values are used only in the addition. Each block becomes a module `stochastic_residual_<i>`, to
    which its layers move. In training it returns the shortcut with probability `drop_rate`, without computing `f(x)`,
    for the whole batch. In evaluation `f(x)` is scaled by the probability of not dropping it.

    Ranks skip different blocks, so `DistributedDataParallel` must find unused parameters.

    Args:
        gm: The graph.
        drop_rate: The probability of skipping a block, in [0, 1].

    Returns:
        `gm` and the number of blocks.

    Raises:
        ValueError: `gm` is not a `GraphModule`, or `drop_rate` is outside [0, 1].

    Example:
        >>> from torch.fx import symbolic_trace
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(4, 4)
        ...
        ...     def forward(self, x):
        ...         return x + torch.relu(self.linear(x))
        >>> _, blocks = apply_stochastic_residual(symbolic_trace(nn.Sequential(Block(), Block())))
        >>> blocks
        2

    Source: Huang, Sun, Liu, Sedra, Weinberger, "Deep Networks with Stochastic Depth", arXiv:1603.09382, section 3.
    Differs: all blocks have the same rate.
    """
    _check_graph(gm)
    check_finite(drop_rate=drop_rate, least=0, most=1)
    moved: list[Node] = []
    count = 0
    for node in list(gm.graph.nodes):
        block = _find_block(gm, node)
        if block is not None:
            moved += block.replace(gm, drop_rate)
            count += 1
    _finish(gm, moved)
    return gm, count


class _StochasticResidual(nn.Module):
    """A residual block that is skipped at random in training.

    Args:
        branch: Computes f(x) from x and further inputs.
        shortcut: Computes the shortcut from x; None: it is x.
        drop_rate: The probability of skipping the branch.
    """

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None, drop_rate: float) -> None:
        super().__init__()
        self.branch, self.shortcut, self.drop_rate = branch, shortcut, drop_rate

    def forward(self, x: torch.Tensor, *inputs: Any) -> Any:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        if not self.training:
            return shortcut + (1 - self.drop_rate) * self.branch(x, *inputs)
        if float(torch.rand(())) < self.drop_rate:  # drawn on the host, which decides what to launch
            return x.clone() if self.shortcut is None else shortcut  # the next layer may work in place
        return shortcut + self.branch(x, *inputs)

    def extra_repr(self) -> str:
        return f"drop_rate={self.drop_rate}"


class _Block:
    """A residual block of a graph.

    Args:
        addition: The node that adds branch and shortcut.
        entry: The node of x.
        branch: The nodes of f, in order.
        shortcut: The nodes of the projection, in order; empty if the shortcut is x.
    """

    def __init__(self, addition: Node, entry: Node, branch: list[Node], shortcut: list[Node]) -> None:
        self.addition, self.entry, self.branch, self.shortcut = addition, entry, branch, shortcut

    def replace(self, gm: GraphModule, drop_rate: float) -> list[Node]:
        """Replace the block by a call of one module; return the nodes that were erased."""
        own = {self.entry, *self.branch}
        sources = (source for node in self.branch for source in node.all_input_nodes)
        others = list(dict.fromkeys(source for source in sources if source not in own))
        shortcut = _submodule(gm, [self.entry], self.shortcut) if self.shortcut else None
        module = _StochasticResidual(_submodule(gm, [self.entry, *others], self.branch), shortcut, drop_rate)
        module.train(gm.training)
        with gm.graph.inserting_before(self.addition):
            call = gm.graph.call_module(_add(gm, "stochastic_residual", module), (self.entry, *others))
        self.addition.replace_all_uses_with(call)
        erased = [self.addition, *reversed(self.branch), *reversed(self.shortcut)]
        for node in erased:
            gm.graph.erase_node(node)
        return erased


def _find_block(gm: GraphModule, addition: Node) -> _Block | None:
    """Return the residual block that ends in a node, if it is one."""
    from torch.fx import Node

    is_call = addition.op in ("call_function", "call_method") and addition.target in _ADDITIONS
    if not is_call or addition.kwargs or len(addition.args) != 2:
        return None
    first, second = addition.args
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return None
    order = _order(gm.graph)
    before = {node: {node, *_reachable(node, lambda each: each.all_input_nodes)} for node in (first, second)}
    common = before[first] & before[second]
    if not common:
        return None
    entry = max(common, key=order)
    after = _reachable(entry, lambda node: node.users)
    shortcut, branch = sorted((sorted(before[end] & after, key=order) for end in (first, second)), key=len)
    projects = all(n.op == "call_module" and isinstance(_module(gm, n), _PROJECTIONS) for n in shortcut)
    learns = any(n.op == "call_module" and [*_module(gm, n).parameters()] for n in branch)
    if len(shortcut) == len(branch) or not (projects and learns):
        return None
    is_closed = _is_closed(shortcut, addition) and _is_closed(branch, addition)
    return _Block(addition, entry, branch, shortcut) if is_closed else None


def _is_closed(nodes: Sequence[Node], addition: Node) -> bool:
    """Return True if the values of nodes are used outside of them only by the addition."""
    inside = {*nodes, addition}
    return all(user in inside for node in nodes for user in node.users)


def _reachable(start: Node, neighbors: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found: set[Node] = set()
    waiting = [start]
    while waiting:
        new = set(neighbors(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _submodule(gm: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node]) -> GraphModule:
    """Return a module that computes the last of some nodes from inputs, with the same layers."""
    from torch.fx import Graph, GraphModule

    graph = Graph()
    copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[nodes[-1]])
    return GraphModule(gm, graph)


def _can_fuse(layers: Sequence[Any], keep_weights: bool) -> bool:
    """Return True if linear layers of one input can be one layer."""
    kinds = {(layer.bias is None, layer.weight.dtype, layer.weight.device, layer.training) for layer in layers}
    trainable = {parameter.requires_grad for layer in layers for parameter in layer.parameters()}
    return len(kinds) == 1 and not (keep_weights and len(trainable) > 1)


def _fuse(gm: GraphModule, source: Node, parts: Sequence[Node], layers: Sequence[Any], keep_weights: bool) -> None:
    """Replace the calls of linear layers by one call of a layer that has the outputs of all of them, and a split."""
    first, sizes = layers[0], [layer.out_features for layer in layers]
    fused = nn.Linear(
        first.in_features, sum(sizes), first.bias is not None, device=first.weight.device, dtype=first.weight.dtype
    )
    if keep_weights:
        with torch.no_grad():
            for name, parameter in fused.named_parameters():
                parameter.copy_(torch.cat([getattr(layer, name) for layer in layers]))
        fused.requires_grad_(first.weight.requires_grad)
    graph = gm.graph
    with graph.inserting_before(parts[0]):
        call = graph.call_module(_add(gm, "fused_linear", fused.train(first.training)), (source,))
        pieces = graph.call_function(torch.split, (call, sizes), {"dim": -1})
        for index, part in enumerate(parts):
            part.replace_all_uses_with(graph.call_function(operator.getitem, (pieces, index)))
    for part in parts:
        graph.erase_node(part)


def _calls_of(gm: GraphModule, ops: Op | Sequence[Op]) -> list[Node]:
    _check_graph(gm)
    functions: set[Any] = set()
    classes: list[type[nn.Module]] = []
    for op in ensure_tuple(ops):
        if isinstance(op, type) and issubclass(op, nn.Module):
            classes.append(op)
        elif isinstance(op, str) or callable(op):
            functions.add(op)
        else:
            raise TypeError(f"An operation must be a function, the name of a method or a class of modules, got {op!r}.")
    return [
        node
        for node in gm.graph.nodes
        if (node.op in ("call_function", "call_method") and node.target in functions)
        or (node.op == "call_module" and isinstance(_module(gm, node), tuple(classes)))
    ]


def _check_graph(gm: Any) -> None:
    from torch.fx import GraphModule

    if not isinstance(gm, GraphModule):
        raise ValueError(
            f"`gm` must be a `torch.fx.GraphModule`, got {type(gm).__name__}. Use `torch.fx.symbolic_trace(model)`."
        )


def _order(graph: Graph) -> Callable[[Node], int]:
    return {node: position for position, node in enumerate(graph.nodes)}.__getitem__


def _module(gm: GraphModule, node: Node) -> Any:
    return gm.get_submodule(str(node.target))


def _add(gm: GraphModule, prefix: str, module: nn.Module) -> str:
    """Add a module as `<prefix>_<i>` with the first i that is free, and return the name."""
    index = 0
    while hasattr(gm, f"{prefix}_{index}"):
        index += 1
    name = f"{prefix}_{index}"
    gm.add_submodule(name, module)
    return name


def _finish(gm: GraphModule, erased: Iterable[Node]) -> None:
    """Remove the modules of erased nodes that no other node uses, and recompile."""
    used = {str(node.target) for node in gm.graph.nodes if node.op in ("call_module", "get_attr")}
    for target in {str(node.target) for node in erased if node.op == "call_module"}:
        if not any(other == target or other.startswith(f"{target}.") for other in used):
            gm.delete_submodule(target)
    gm.graph.lint()
    gm.recompile()
