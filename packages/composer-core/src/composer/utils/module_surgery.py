"""Replace modules inside a model and keep the optimizer in step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from composer.utils.iter_helpers import ensure_tuple

__all__ = [
    "ReplacementFunction",
    "count_module_instances",
    "replace_module_classes",
    "update_params_in_optimizer",
]

_log = logging.getLogger(__name__)

ReplacementFunction = Callable[[torch.nn.Module, int], torch.nn.Module | None]
"""Takes a module and how many modules its policy matched before; returns a replacement, or None to keep the module."""

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

    The descendants (not `module` itself) are visited depth first, parents before children, each once. Every policy
    whose class a descendant is an instance of is asked, in order. A replacement takes all places where the old module
    was held, and gets the old module's device and training flag. Its weights are its own: copying them is the policy's
    business.

    Args:
        module: The model.
        policies: For each class a function `(module, index)`, where the index counts the modules that this policy was
            asked about before. It returns the replacement, the same module (changed in place), or None.
        optimizers: The optimizer that trains `module`: parameters of replaced modules leave it and new ones enter.
            Needed unless it is made afterwards.
        recurse_on_replacements: Whether to visit the replacements and their new descendants as well. The policies must
            then stop at some point.
        indices: Where each policy starts counting; updated in place. None starts at 0.

    Returns:
        The replacement of each replaced module.

    Raises:
        TypeError: `module` is wrapped in `DistributedDataParallel`.
        AssertionError: Two policies replace the same module.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> replaced = replace_module_classes(model, {torch.nn.ReLU: lambda module, index: torch.nn.GELU()})
        >>> model
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): GELU(approximate='none')
        )

    Differs: a descendant that has left the model, because what held it was replaced, is not visited; a parameter that
        the rest of the model still uses stays in the optimizer.
    """
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            "`module` must not be wrapped in `DistributedDataParallel`, which would not see the new parameters. "
            "Replace first, then wrap."
        )
    indices = {} if indices is None else indices
    places: _Places = {}
    seen = {module}
    queue = deque(_find_places(module, places, seen))
    replaced: dict[torch.nn.Module, torch.nn.Module] = {}
    while queue:
        old = queue.popleft()
        if not _is_held(old, module, places):
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
            fresh = [new] if new not in seen else []
            fresh += _find_places(new, places, seen)
            if recurse_on_replacements:
                queue.extend(fresh)
            if optimizers:
                _update_optimizer(old, new, module, optimizers)
    if replaced and not optimizers:
        _log.info("%d modules were replaced without an optimizer to update. Make it afterwards.", len(replaced))
    return replaced


def count_module_instances(
    module: torch.nn.Module, module_class: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...]
) -> int:
    """The number of different descendants of a module (not itself) that are instances of a class or classes.

    Example:
        >>> count_module_instances(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), torch.nn.ReLU)
        2
    """
    return sum(isinstance(child, module_class) for child in module.modules() if child is not module)


def update_params_in_optimizer(
    old_params: Iterable[torch.nn.Parameter], new_params: Iterable[torch.nn.Parameter], optimizers: Optimizers
) -> None:
    """Replace parameters in an optimizer, in place, with their optimizer state.

    Parameters in both lists keep their place and state. The others of `old_params` leave, and the others of
    `new_params` are appended, in order, to the group that the removed ones were in.

    Args:
        old_params: Parameters of the modules before the change.
        new_params: Parameters of the modules after it.
        optimizers: The optimizer, or a sequence with one.

    Raises:
        NotImplementedError: There is more than one optimizer.
        RuntimeError: The optimizer has several groups, and the removed parameters do not tell to which the new ones
            belong: none is removed, one is in no group, or they are in different groups.
    """
    optimizers = ensure_tuple(optimizers)
    if len(optimizers) != 1:
        raise NotImplementedError(f"`optimizers` must be a single optimizer, got {len(optimizers)}.")
    optimizer = optimizers[0]
    old, new = list(old_params), list(new_params)
    removed = [p for p in old if not _tensor_in(p, new)]
    added = [p for p in new if not _tensor_in(p, old)]
    if not removed and not added:
        return
    groups = optimizer.param_groups
    target = _group_of_new_params(removed, added, optimizer)
    for parameter in removed:
        optimizer.state.pop(parameter, None)
    for group in groups:
        group["params"] = [p for p in group["params"] if not _tensor_in(p, removed)]
        group.pop("param_names", None)  # the new ones have none, and an optimizer names all or none
    groups[target]["params"].extend(p for p in added if _find_param_in_optimizer(p, optimizer) < 0)


def _group_of_new_params(
    removed: list[torch.nn.Parameter], added: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> int:
    if len(optimizer.param_groups) == 1:
        return 0
    where = {_find_param_in_optimizer(p, optimizer) for p in removed}
    problem = None
    if not removed:
        problem = "no parameter is removed"
    elif -1 in where:
        problem = "a removed parameter is in none of them"
    elif added and len(where) > 1:
        problem = f"the removed parameters are in several of them, {sorted(where)}"
    if problem is not None:
        raise RuntimeError(
            f"`optimizers` has {len(optimizer.param_groups)} parameter groups, and {problem}, so the group of the "
            f"{len(added)} new parameters cannot be told. Replace the modules before you make the optimizer."
        )
    return min(where)


def _tensor_in(tensor: torch.Tensor, iterable: Iterable[torch.Tensor]) -> bool:
    """Whether this very tensor is among others; `in` would compare values."""
    return any(tensor is other for other in iterable)


def _find_param_in_optimizer(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
    """The index of the group that holds a parameter, or -1."""
    for index, group in enumerate(optimizer.param_groups):
        if _tensor_in(param, group["params"]):
            return index
    return -1


def _find_places(root: torch.nn.Module, places: _Places, seen: set[torch.nn.Module]) -> list[torch.nn.Module]:
    """Note where the descendants of `root` are held; list the unseen ones depth first, parents before children."""
    found: list[torch.nn.Module] = []

    def visit(parent: torch.nn.Module) -> None:
        seen.add(parent)
        for name, child in parent._modules.items():  # `named_children` hides a second name of the same child
            if child is None:
                continue
            held_at = places.setdefault(child, [])
            if (parent, name) not in held_at:
                held_at.append((parent, name))
            if child not in seen:
                found.append(child)
                visit(child)

    visit(root)
    return found


def _is_held(module: torch.nn.Module, root: torch.nn.Module, places: _Places) -> bool:
    """Whether the model still contains a module."""
    if module is root:
        return True
    return any(
        parent._modules.get(name) is module and _is_held(parent, root, places)
        for parent, name in places.get(module, ())
    )


def _put_in_place(old: torch.nn.Module, new: torch.nn.Module, root: torch.nn.Module, places: _Places) -> None:
    if new is old:
        return
    device = _device_of(old) or _device_of(root)
    if device is not None:
        new.to(device)
    kept = set(old.modules())
    for part in new.modules():
        if part not in kept:
            part.training = old.training
    for parent, name in places[old]:
        if parent._modules.get(name) is old:
            setattr(parent, name, new)
            places.setdefault(new, []).append((parent, name))


def _device_of(module: torch.nn.Module) -> torch.device | None:
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device
    return None


def _update_optimizer(
    old: torch.nn.Module, new: torch.nn.Module, root: torch.nn.Module, optimizers: Optimizers
) -> None:
    still_used = set(root.parameters())
    new_params = list(new.parameters())
    old_params = [p for p in old.parameters() if p not in still_used or _tensor_in(p, new_params)]
    update_params_in_optimizer(old_params, new_params, optimizers)
