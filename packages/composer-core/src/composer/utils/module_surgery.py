"""Replace modules of a model, and update the optimizer accordingly."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from composer.utils.iter_helpers import ensure_tuple

_log = logging.getLogger(__name__)

ReplacementFunction = Callable[[torch.nn.Module, int], torch.nn.Module | None]
"""A function of a module and the number of earlier matches; returns a replacement, or None to keep the module."""

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_Places = dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]]


def replace_module_classes(
    module: torch.nn.Module,
    policies: Mapping[type[torch.nn.Module], ReplacementFunction],
    optimizers: Optimizers | None = None,
    recurse_on_replacements: bool = False,
    indices: dict[type[torch.nn.Module], int] | None = None,
) -> dict[torch.nn.Module, torch.nn.Module]:
    """Replace descendants of a module by type, in place.

    The descendants (not `module` itself) are visited depth first, parents before children, each once. For each of them
    all policies of matching classes are called, in order. A replacement is assigned everywhere the old module was, and
    gets its device, its training flag and, unless it wraps the old module, its hooks. Policies must copy weights.

    Lazy modules of unknown shape, and modules that were compiled on their own, are not replaced, with a warning.

    Args:
        module: The model.
        policies: For each class a function `(module, index)`, where `index` is the number of earlier calls of the
            policy. It returns the replacement, the same module (changed in place), or None.
        optimizers: The optimizers of `module`, in which the parameters of replaced modules are replaced. Required
            unless they are created afterwards.
        recurse_on_replacements: Visit the replacements and their new descendants as well. The policies must
            then return None at some point.
        indices: The first index for each policy; updated in place. None starts at 0.

    Returns:
        The replacement of each replaced module.

    Raises:
        TypeError: `module` is, or contains, a `DistributedDataParallel`.
        AssertionError: Two policies replace the same module.
        RuntimeError: The optimizer has several parameter groups, and a new parameter may belong to more than one; see
            `update_params_in_optimizer`.

    Warns:
        UserWarning: A module that matches a policy is lazy, or was compiled on its own.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> replaced = replace_module_classes(model, {torch.nn.ReLU: lambda module, index: torch.nn.GELU()})
        >>> model
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): GELU(approximate='none')
        )

    Differs: a descendant whose parent was replaced, and which is no longer in the model, is not visited; a parameter
        that the rest of the model still uses stays in the optimizer.
    """
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise TypeError(
            "`module` must not be wrapped in `DistributedDataParallel`, which would not see the new parameters. "
            "Replace first, then wrap."
        )
    indices = {} if indices is None else indices
    places: _Places = {}
    seen = {module}
    queue = deque(_find_places(module, places, seen))
    replaced: dict[torch.nn.Module, torch.nn.Module] = {}
    kept: dict[torch.nn.Module, str] = {}
    while queue:
        old = queue.popleft()
        if not _is_held(old, module, places):
            continue
        reason = _reason_to_keep(old, places) if isinstance(old, tuple(policies)) else None
        if reason is not None:
            kept[old] = reason
            continue
        for policy_class, policy in policies.items():
            if not isinstance(old, policy_class):
                continue
            index = indices.setdefault(policy_class, 0)
            indices[policy_class] += 1
            new = policy(old, index)
            if new is None:
                continue
            if old in replaced:
                raise AssertionError(f"{old} must be replaced only once, but a second replacement was made: {new}.")
            replaced[old] = new
            _put_in_place(old, new, module, places)
            unseen = [new] if new not in seen else []
            unseen += _find_places(new, places, seen)
            if recurse_on_replacements:
                queue.extend(unseen)
            if optimizers:
                new_params = list(new.parameters())
                used_elsewhere = {*module.parameters()} - {*new_params}
                removed = [p for p in old.parameters() if p not in used_elsewhere]
                update_params_in_optimizer(removed, new_params, optimizers)
    warn_about_kept_modules("replace_module_classes", module, kept)
    if replaced and not optimizers:
        _log.info("%d modules were replaced without an optimizer. Create the optimizer afterwards.", len(replaced))
    return replaced


def count_module_instances(
    module: torch.nn.Module, module_class: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...]
) -> int:
    """Count the distinct descendants of a module (not itself) that are instances of a class or classes.

    Example:
        >>> count_module_instances(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), torch.nn.ReLU)
        2
    """
    return sum(isinstance(child, module_class) for child in module.modules() if child is not module)


def overrides_forward(module: torch.nn.Module, base: type[torch.nn.Module]) -> bool:
    """Return True if a module overrides the `forward` of `base`.

    Hooks and parametrizations do not count: they change the inputs, weights and outputs, not the code.

    Args:
        module: An instance of `base`.
        base: A layer of torch, such as `torch.nn.Conv2d`.

    Example:
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> [overrides_forward(layer, torch.nn.Linear) for layer in (torch.nn.Linear(2, 2), Doubled(2, 2))]
        [False, True]
    """
    return any(
        name in vars(module) or getattr(type(module), name, None) is not getattr(base, name, None)
        for name in ("forward", "_conv_forward")
    )


def takes_one_input(module: torch.nn.Module) -> bool:
    """Return True if the `forward` of a module has one argument, so that a wrapper with one argument can call it.

    `*args` and `**kwargs` do not count: usually they are passed on to another `forward`.

    Args:
        module: A layer to wrap.

    Example:
        >>> class Masked(torch.nn.Linear):
        ...     def forward(self, input, mask=None):
        ...         return super().forward(input if mask is None else input * mask)
        >>> [takes_one_input(layer) for layer in (torch.nn.Linear(2, 2), Masked(2, 2))]
        [True, False]
    """
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return sum(kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for kind in kinds) <= 1


def find_adapter_layers(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the layers inside low-rank adapters such as LoRA: the adapted layers and those of the adapters.

    An adapter depends on the weight and the sizes of the adapted layer, so neither may be replaced alone. Adapters are
    detected by the names of peft: a child `base_layer`, and `adapter_layer_names` or children `lora_...`.

    Args:
        model: The model, which may be an adapter itself.
    """
    layers: set[torch.nn.Module] = set()
    for module in model.modules():
        is_lora = hasattr(module, "adapter_layer_names") or any(name.startswith("lora_") for name in module._modules)
        if is_lora and module._modules.get("base_layer") is not None:
            layers.update(part for part in module.modules() if part is not module)
    return layers


def list_modules(model: torch.nn.Module, reasons: Mapping[torch.nn.Module, str]) -> str:
    """Return a text with a line for each type and reason: the name of the first module, and how many more there are.

    Args:
        model: The model with the modules.
        reasons: A sentence about each module.

    Example:
        >>> layers = [torch.nn.ReLU(), torch.nn.ReLU()]
        >>> print(list_modules(torch.nn.Sequential(*layers), dict.fromkeys(layers, "it has no weights")))
        <BLANKLINE>
          `0` and 1 more (ReLU): it has no weights
    """
    names = {module: name or "the model" for name, module in model.named_modules()}
    lines: dict[tuple[str, str], list[str]] = {}
    for module, reason in reasons.items():
        lines.setdefault((type(module).__name__, reason), []).append(names.get(module, "?"))
    return "".join(
        f"\n  `{first}`{f' and {len(others)} more' if others else ''} ({kind}): {reason}"
        for (kind, reason), (first, *others) in lines.items()
    )


def warn_about_kept_modules(function: str, model: torch.nn.Module, kept: Mapping[torch.nn.Module, str]) -> None:
    """Warn, in one message, about modules of a matching type that a function did not replace.

    Args:
        function: The name of the function.
        model: The model with the modules.
        kept: The reason for each module. If empty, there is no warning.

    Warns:
        UserWarning: `kept` is not empty. Modules of the same type and reason share a line with the name of the first.
    """
    if not kept:
        return
    count = "1 module as it is" if len(kept) == 1 else f"{len(kept)} modules as they are"
    warnings.warn(f"`{function}` left {count}:{list_modules(model, kept)}", stacklevel=3)


def warn_about_narrow_convolutions(model: torch.nn.Module, layout: str, advice: str, stacklevel: int = 3) -> None:
    """Warn about convolutions on the CPU whose backward pass in the layout NHWC writes beyond torch's memory.

    They have a kernel of 1 x 1, a stride above 1 and fewer than 8 input channels: torch 2.14 on processors with AVX2.

    Args:
        model: The model.
        layout: The beginning of the message: who chooses the layout.
        advice: What to do instead, besides wider layers.
        stacklevel: The number of frames from here to the caller that the warning names.

    Warns:
        UserWarning: The model has such a layer; the first one is named.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Conv2d) or is_lazy(layer.weight) or layer.weight.device.type != "cpu":
            continue
        if layer.kernel_size == (1, 1) and max(layer.stride) > 1 and layer.in_channels < 8:
            warnings.warn(
                f"{layout} the layout NHWC, in which torch can end the process with a memory error: in the backward "
                f"pass, on a CPU, of a 1 x 1 convolution with a stride above 1 and fewer than 8 input channels, as "
                f"`{name}` ({layer}). Make it wider, or {advice}.",
                stacklevel=stacklevel,
            )
            return


def update_params_in_optimizer(
    old_params: Iterable[torch.nn.Parameter], new_params: Iterable[torch.nn.Parameter], optimizers: Optimizers
) -> None:
    """Replace parameters in the optimizers, in place, and drop the optimizer state of removed ones.

    Parameters in both lists are unchanged. Parameters that are only in `old_params` are removed with their state.
    Parameters that are only in `new_params` are appended, in order. There are two kinds of parameters: weights (more
    than one dimension), and biases and scales of norms. With several parameter groups, of one or of several optimizers,
    a new parameter joins

    1. the group of the removed parameters of its kind, or else of the unchanged ones of its kind;
    2. if `old_params` has none of its kind: the group of `old_params`, if that contains its kind;
    3. otherwise the group that contains its kind and differs from that of `old_params` only in weight decay; or the
       only group of its kind, if no group mixes kinds;
    4. otherwise the group of `old_params`.

    Args:
        old_params: The parameters of the modules before the change.
        new_params: The parameters of the modules after the change.
        optimizers: The optimizer, or a sequence of optimizers.

    Raises:
        RuntimeError: A new parameter may belong to more than one group, or its optimizer is a wrapper that cannot take
            new parameters. Nothing is changed.
    """
    owners = [(optimizer, group) for optimizer in ensure_tuple(optimizers) for group in optimizer.param_groups]
    groups = [group for _, group in owners]
    index_of = {p: index for index in reversed(range(len(groups))) for p in groups[index]["params"]}
    old, new = dict.fromkeys(old_params), dict.fromkeys(new_params)  # ordered sets
    removed = [p for p in old if p not in new]
    added = [p for p in new if p not in old and p not in index_of]
    kept = [p for p in old if p in new]
    targets = [_group_of_new_param(p, removed, kept, groups, index_of) for p in added]
    changed = {*targets, *(index_of[p] for p in removed if p in index_of)}
    for optimizer in {id(owners[index][0]): owners[index][0] for index in changed}.values():
        if has_own_state_dict(optimizer):
            raise RuntimeError(
                f"`optimizers` must accept new parameters, got {type(optimizer).__name__}, a wrapper with a separate "
                f"state for its first parameters. Replace the modules before you make the optimizer, with the function "
                f"of the algorithm (`composer.functional.apply_...`), or use the optimizer inside it."
            )
    for index in changed:
        optimizer, group = owners[index]
        for parameter in removed:
            optimizer.state.pop(parameter, None)
        group["params"][:] = [p for p in group["params"] if p not in old or p in new]
        for other in optimizer.param_groups:  # new parameters have no name, and names are needed for all or none
            other.pop("param_names", None)
    for parameter, target in zip(added, targets, strict=True):
        groups[target]["params"].append(parameter)


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the `state_dict` of an optimizer, such as a wrapper, lacks the keys "state" or "param_groups"."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return False
    return not {"state", "param_groups"} <= optimizer.state_dict().keys()


def _group_of_new_param(
    new: torch.nn.Parameter,
    removed: list[torch.nn.Parameter],
    kept: list[torch.nn.Parameter],
    groups: list[dict[str, Any]],
    index_of: Mapping[torch.nn.Parameter, int],
) -> int:
    """Return the index of the group for a new parameter, by the rules of `update_params_in_optimizer`."""
    if len(groups) == 1:
        return 0

    def groups_of(params: Iterable[torch.nn.Parameter]) -> set[int]:
        return {index_of[p] for p in params if p in index_of}

    candidates: set[int] = set()
    for relatives in (removed, kept):
        candidates = groups_of(p for p in relatives if _is_weight(p) is _is_weight(new))
        if candidates:
            break
    if not candidates:
        near = groups_of([*removed, *kept])
        kinds = [{_is_weight(p) for p in group["params"]} for group in groups]
        same_kind = {index for index, held in enumerate(kinds) if _is_weight(new) in held}
        candidates = near & same_kind
        if not candidates and near:
            candidates = {i for i in same_kind if any(_differ_in_decay_only(groups[i], groups[j]) for j in near)}
        if not candidates and near:
            split_by_kind = all(len(held) <= 1 for held in kinds)
            candidates = same_kind if len(same_kind) == 1 and split_by_kind else near
        if not candidates:
            candidates = same_kind
    if len(candidates) != 1:
        raise RuntimeError(
            f"`optimizers` must have one parameter group to which a new parameter of shape {tuple(new.shape)} belongs, "
            f"got {sorted(candidates)} of its {len(groups)} groups. Replace the modules before you make the optimizer."
        )
    return candidates.pop()


def _is_weight(parameter: torch.Tensor) -> bool:
    """Return True if a parameter is a weight, which usually has weight decay, instead of a bias or scale."""
    return parameter.dim() > 1


def _differ_in_decay_only(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return True if the options of two groups differ in weight decay only; names of groups do not count."""
    names = {"params", "param_names", "name", "group_name"}
    return {"weight_decay"} == {key for key in {*one, *other} - names if one.get(key) != other.get(key)}


def _find_places(root: torch.nn.Module, places: _Places, seen: set[torch.nn.Module]) -> list[torch.nn.Module]:
    """Record the parents of all descendants of `root`; return unseen ones depth first, parents before children."""
    unseen: list[torch.nn.Module] = []

    def visit(parent: torch.nn.Module) -> None:
        seen.add(parent)
        for name, child in parent._modules.items():  # `named_children` omits a second name of the same child
            if child is None:
                continue
            held_at = places.setdefault(child, [])
            if (parent, name) not in held_at:
                held_at.append((parent, name))
            if child not in seen:
                unseen.append(child)
                visit(child)

    visit(root)
    return unseen


def _is_held(module: torch.nn.Module, root: torch.nn.Module, places: _Places) -> bool:
    """Return True if the model still contains a module."""
    if module is root:
        return True
    return any(
        parent._modules.get(name) is module and _is_held(parent, root, places)
        for parent, name in places.get(module, ())
    )


def _reason_to_keep(module: torch.nn.Module, places: _Places) -> str | None:
    """Return the reason why a module must not be replaced, because that would fail silently; None if there is none."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "its shape is not known yet. Run the model on one batch first"
    if any(name == "_orig_mod" for _, name in places[module]):
        return "it was compiled on its own, and the compiled code would not change. Compile after replacing modules"
    return None


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _put_in_place(old: torch.nn.Module, new: torch.nn.Module, root: torch.nn.Module, places: _Places) -> None:
    if new is old:
        return
    tensors = (chain(module.parameters(), module.buffers()) for module in (old, root))
    tensor = next(chain.from_iterable(tensors), None)
    if tensor is not None:
        new.to(tensor.device)
    kept = set(old.modules())
    if old not in set(new.modules()) and any(vars(old)[name] for name in _HOOKS):
        # The same dicts, so that the handles of the hooks can still remove them.
        vars(new).update({name: vars(old)[name] for name in (*_HOOKS, "_is_full_backward_hook")})
    for part in new.modules():
        if part not in kept:
            part.training = old.training
    for parent, name in places[old]:
        if parent._modules.get(name) is old:
            setattr(parent, name, new)
            places.setdefault(new, []).append((parent, name))
