"""Save and load optimizers: `{class name: state}`, where the state is keyed by parameter name.

A wrapper of an optimizer (it has `base_optimizer`) is saved under the class name of the innermost optimizer, so that
runs with and without the wrapper find the same entry. The entry is the `state_dict` of the wrapper, with its settings
in the parameter groups. A run without the wrapper keeps these settings unused, so that a run that wraps its optimizer
after loading still gets them.

A `state_dict` without the keys "state" and "param_groups" is saved and loaded unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer.utils.module_surgery import has_own_state_dict

if TYPE_CHECKING:
    from composer.core.state import State


def numbered(pairs: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    """Yield the pairs; repeated names are numbered: `"name"`, `"name#2"`, ..."""
    count: dict[str, int] = {}
    for name, value in pairs:
        count[name] = count.get(name, 0) + 1
        yield (name if count[name] == 1 else f"{name}#{count[name]}"), value


def named(objects: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return pairs of class name and object; repeated class names are numbered."""
    return list(numbered((type(o).__qualname__, o) for o in objects))


def optimizers_state(state: State) -> dict[str, Any]:
    """Return the states of all optimizers by the class name of the innermost optimizer."""
    pairs = numbered((type(_innermost(o)).__qualname__, o) for o in state.optimizers)
    return {name: optimizer_state(state, o) for name, o in pairs}


def optimizer_state(state: State, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, keyed by parameter names instead of numbers."""
    plain = optimizer.state_dict()
    if _has_custom_form(plain):
        return plain
    return _renamed(plain, dict(enumerate(name for group in _parameter_names(state, optimizer) for name in group)))


def load_optimizers(state: State, saved: dict[str, Any], strict: bool) -> None:
    """Restore the optimizers by class name.

    Raises:
        KeyError: `strict`, and the saved optimizer has other parameters than this one.
        ValueError: The saved optimizers are in another order, or one has other parameter groups, or a state dict with
            other keys.
    """
    bases = list(numbered((type(_innermost(o)).__qualname__, o) for o in state.optimizers))
    here = [name for name, _ in bases if name in saved]
    there = [name for name in saved if name in here]
    if here != there:  # schedulers and settings of groups are saved in the order of the list
        raise ValueError(
            f"The optimizers are in another order than in the state_dict: {', '.join(here)} instead of "
            f"{', '.join(there)}. Put them in the order of the run that was saved."
        )
    outers = [name for name, _ in named(state.optimizers)]
    found = {name if name in saved else outer for (name, _), outer in zip(bases, outers, strict=True)} & saved.keys()
    if bases and len(found) == len(bases) < len(saved):
        warnings.warn(
            f"The state_dict has {', '.join(sorted(saved.keys() - found))} beside the optimizers of this run, "
            f"{', '.join(sorted(found))}. Its state is not used.",
            stacklevel=4,
        )
    for (name, optimizer), outer in zip(bases, outers, strict=True):
        if name in saved:
            _load_one(state, optimizer, name, saved[name], strict)
        elif outer in saved:
            warnings.warn(
                f"The optimizer was saved as `{outer}`, not as the `{name}` inside it. State of `{name}` that the file "
                f"does not contain, such as momentum, starts from zero.",
                stacklevel=4,
            )
            _load_one(state, optimizer, outer, saved[outer], strict)
        else:
            warnings.warn(
                f"{name} of `optimizers` is not in the state_dict, which has "
                f"{', '.join(sorted(saved)) or 'none'}. It keeps its current state.",
                stacklevel=4,
            )


def _load_one(state: State, optimizer: torch.optim.Optimizer, name: str, saved: dict[str, Any], strict: bool) -> None:
    has_custom_form = has_own_state_dict(optimizer)
    if has_custom_form is not _has_custom_form(saved):
        raise ValueError(
            f"The saved {name} has the entries {', '.join(map(str, saved))}, which this {type(optimizer).__name__} "
            f"cannot load: the file was saved with another optimizer of that name. Use that optimizer, or load without "
            f"its state: `load_ignore_keys=['state/optimizers/*']`."
        )
    if has_custom_form:
        optimizer.load_state_dict(saved)
        return
    own = _parameter_names(state, optimizer)
    index = {parameter: i for i, parameter in enumerate(p for group in own for p in group)}
    numbers = [p for group in saved["param_groups"] for p in group["params"]]
    if numbers and all(isinstance(p, int) for p in numbers) and len(numbers) == len(index):  # torch's own form
        saved = _renamed(saved, dict(zip(numbers, index, strict=True)))
    _check_groups(name, own, [group["params"] for group in saved["param_groups"]], strict)
    # The saved names are in the saved order, which may differ from that of this optimizer.
    settings = [{key: value for key, value in group.items() if key != "param_names"} for group in saved["param_groups"]]
    groups = [{**group, "params": [index[name] for name in names]} for names, group in zip(own, settings, strict=True)]
    states = {index[p]: value for p, value in saved["state"].items() if p in index}
    optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})


def _has_custom_form(saved: dict[str, Any]) -> bool:
    return not {"state", "param_groups"} <= saved.keys()


def _check_groups(name: str, own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]], strict: bool) -> None:
    advice = "Apply the same algorithms and build the optimizer from the same parameters."
    here, there = ({p for group in groups for p in group} for groups in (own, saved))
    if strict and here != there:
        parts = [("only in the file", there - here), ("only in this one", here - there)]
        differences = "; ".join(f"{', '.join(sorted(map(str, names)))} ({where})" for where, names in parts if names)
        raise KeyError(f"The saved {name} and this one hold different parameters: {differences}. {advice}")
    if len(own) != len(saved):
        raise ValueError(
            f"The saved {name} has {len(saved)} parameter groups of {[len(group) for group in saved]} parameters, but "
            f"this one has {len(own)} of {[len(group) for group in own]}. Build the optimizer with the same groups."
        )
    for i, (own_names, saved_names) in enumerate(zip(own, saved, strict=True)):
        moved = sorted({*own_names} ^ {*saved_names})
        if strict and moved:
            raise ValueError(
                f"The saved {name} and this one divide the parameters into groups differently: {', '.join(moved)} "
                f"(group {i}). Build the optimizer with the same groups."
            )


def _renamed(saved: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in saved["param_groups"]]
    return {**saved, "state": {names[p]: value for p, value in saved["state"].items()}, "param_groups": groups}


def _parameter_names(state: State, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the parameter names of an optimizer by group, in the order in which torch numbers the parameters."""
    module: Any = state.model.module if state.is_model_ddp else state.model
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: list[list[str]] = []
    count = 0
    for group in optimizer.param_groups:
        # A parameter that is no longer in the model has no name, so it gets its number.
        names = [by_id.get(id(p), f"parameter {count + i}") for i, p in enumerate(group["params"])]
        groups.append(names)
        count += len(names)
    return groups


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the innermost optimizer of a wrapper, or the optimizer itself."""
    while isinstance(base := getattr(optimizer, "base_optimizer", None), torch.optim.Optimizer):
        optimizer = base
    return optimizer
