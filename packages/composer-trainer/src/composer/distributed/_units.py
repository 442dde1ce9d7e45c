"""Select the modules of a model that are sharded as units: gathered together before they run, and freed together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_OPTIONS = {"mesh", "mp_policy", "offload_policy", "reshard_after_forward", "shard_placement_fn"}


@dataclass
class Unit:
    """A module whose parameters are gathered and freed together.

    Attributes:
        name: Its name in the model; empty: the model itself.
        module: The module.
        options: Arguments of `fully_shard` for this module only.
    """

    name: str
    module: torch.nn.Module
    options: dict[str, Any] = field(default_factory=dict)


def plan_units(model: torch.nn.Module, auto_wrap: bool = True) -> list[Unit]:
    """Return the units of a model, inner ones before outer ones.

    Each child of the model with parameters is a unit. Inside a child, these modules are units: those with an attribute
    `_fsdp_wrap = True`, and those for which the child's `fsdp_wrap_fn(module)` returns True or a dict of arguments of
    `fully_shard`; without that method, those of the classes in its `_no_split_modules`. A module or child with
    `_fsdp_wrap = False` belongs to the unit around it. Parameters outside all children belong to the model itself. In
    place of a container without a forward pass, such as `ModuleDict`, its members count as children.

    Args:
        model: The model, such as a `ComposerModel`.
        auto_wrap: Use `_no_split_modules`.

    Raises:
        KeyError: `fsdp_wrap_fn` returned an unknown argument.
        ValueError: Two units share a parameter.
    """
    units: list[Unit] = []
    children = dict(_children(model))
    # A child that is also inside another child belongs to that child.
    inner = {id(module) for child in children.values() for module in child.modules() if module is not child}
    for name, child in children.items():
        if id(child) not in inner and any(True for _ in child.parameters()):
            units += _units_of_child(name, child, auto_wrap)
    covered = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    if any(id(parameter) not in covered for parameter in model.parameters()):
        units.append(Unit("", model))
    _check_sharing(model, units)
    return units


def _children(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_children():
        is_container = type(child).forward is torch.nn.Module.forward
        if is_container and getattr(child, "_fsdp_wrap", None) is not False:
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _units_of_child(name: str, child: torch.nn.Module, auto_wrap: bool) -> list[Unit]:
    wrap_fn = getattr(child, "fsdp_wrap_fn", None)
    classes = (getattr(child, "_no_split_modules", None) or ()) if auto_wrap else ()
    units = []
    for inner, module in reversed([*child.named_modules(prefix=name)]):  # inner ones first
        answer: Any = True
        if module is not child:
            answer = type(module).__name__ in classes if wrap_fn is None else wrap_fn(module) or False
        attribute = getattr(module, "_fsdp_wrap", None)
        answer = answer if attribute is None else bool(attribute) and (answer or True)
        unknown = answer.keys() - _OPTIONS if isinstance(answer, dict) else ()
        if unknown:
            raise KeyError(
                f"`fsdp_wrap_fn` returned {', '.join(sorted(map(repr, unknown)))} for {inner!r}; known arguments of a "
                f"unit are {', '.join(sorted(_OPTIONS))}."
            )
        if answer is not False and any(True for _ in module.parameters()):
            units.append(Unit(inner, module, dict(answer) if isinstance(answer, dict) else {}))
    return units


def _check_sharing(model: torch.nn.Module, units: list[Unit]) -> None:
    """Raise ValueError if a parameter is in two units: it would become two parameters once they are sharded."""
    owners: dict[int, tuple[str, str]] = {}
    names = {id(unit.module): unit.name for unit in units}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full, owner = f"{path}.{key}".lstrip("."), _owner(model, path, names)
            first, first_owner = owners.setdefault(id(parameter), (full, owner))
            if first_owner != owner:
                with_model = "" in (first_owner, owner)
                what = (
                    f"Parameter sharing detected between modules to be sharded and module {owner or first_owner!r}"
                    if with_model
                    else "Detected tied parameters between modules designated for FSDP wrapping"
                )
                units_of = [repr(name) if name else "the model itself" for name in (first_owner, owner)]
                raise ValueError(
                    f"{what}: {first!r} (in the unit {units_of[0]}) and {full!r} (in the unit {units_of[1]}) are one "
                    f"parameter. Set `_fsdp_wrap = False` on the inner of these units, so that both belong to one unit."
                )


def _owner(model: torch.nn.Module, path: str, names: dict[int, str]) -> str:
    """Return the name of the innermost unit around a module."""
    while path:
        module = model.get_submodule(path)
        if id(module) in names:
            return names[id(module)]
        path = path.rpartition(".")[0]
    return ""
