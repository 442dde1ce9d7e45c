"""The layout of a saved state.

- `model`: parameters and buffers by name, without the `module.` prefix of DDP.
- `optimizers`: `{class name: state}`, where the state is keyed by parameter name.
- `schedulers`, `callbacks`, `scaler`, `timestamp`: `{class name: state_dict()}`; a second object of one class is stored
  under `"Name#2"`, so nothing is lost.
- `algorithms`: a list of `(class name, state_dict())` in order.
- `train_metrics`, `eval_metrics`: only with `save_metrics`.
- `rank_zero_seed`, `run_name`: as they are. `integrations`, `metadata`: what helps to read the file elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from composer.utils import dist

if TYPE_CHECKING:
    from composer.core.state import State

__all__ = ["load", "load_model", "load_optimizers", "metadata", "model_state", "optimizer_state", "save"]

_COLLECTIONS = ("schedulers", "callbacks")


def model_state(state: State) -> dict[str, Any]:
    """Parameters and buffers by name, without a `module.` prefix."""
    module = state.model.module if state.is_model_ddp else state.model
    result: dict[str, Any] = module.state_dict()  # type: ignore[union-attr]
    return result


def optimizer_state(state: State, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state, keyed by parameter names instead of numbers."""
    names = _parameter_names(state, optimizer)
    plain = optimizer.state_dict()
    return {
        **plain,
        "state": {names[index]: value for index, value in plain["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]} for group in plain["param_groups"]
        ],
    }


def _parameter_names(state: State, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters in the order in which torch numbers them."""
    module = state.model.module if state.is_model_ddp else state.model
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}  # type: ignore[union-attr]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A parameter that is no longer in the model has no name; its number keeps it apart.
    return [by_id.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(parameters)]


def save(state: State) -> dict[str, Any]:
    """Everything in `state.serialized_attributes`, and the metadata."""
    saved: dict[str, Any] = {}
    for name in state.serialized_attributes:
        value = getattr(state, name)
        if name == "model":
            saved[name] = model_state(state)
        elif name == "optimizers":
            saved[name] = {k: optimizer_state(state, o) for k, o in _named(value)}
        elif name in ("train_metrics", "eval_metrics"):
            if state.save_metrics:
                saved[name] = _metrics(value) if name == "train_metrics" else {k: _metrics(v) for k, v in value.items()}
        elif name == "algorithms":
            saved[name] = [(type(a).__qualname__, a.state_dict()) for a in value]
        elif name in _COLLECTIONS:
            saved[name] = {k: o.state_dict() for k, o in _named(value)}
        elif name in ("scaler", "timestamp") and value is not None:
            saved[name] = {type(value).__qualname__: value.state_dict()}
        elif value is not None:
            saved[name] = value
    saved["integrations"] = _integrations(state)
    saved["metadata"] = metadata(state)
    return saved


def metadata(state: State) -> dict[str, Any]:
    """Versions, device and sizes of the run that saved."""
    from composer.utils.collect_env import get_composer_env_dict

    found: dict[str, Any] = {
        "composer_env_info": get_composer_env_dict(),
        "torch_version": str(torch.__version__),
        "device": state.device.name,
        "precision": state.precision.value,
        "world_size": dist.get_world_size(),
        "device_train_microbatch_size": state.device_train_microbatch_size,
    }
    batch_size = getattr(state.train_dataloader, "batch_size", None)
    if batch_size is not None:
        found["train_dataloader_batch_size"] = batch_size
    return found


def load(state: State, saved: dict[str, Any], strict: bool) -> None:
    """Restore a saved state; what this state has and the saved one lacks is left alone with a warning."""
    if "model" in saved:
        load_model(state, saved, strict)
    for name in sorted(saved):
        value = saved[name]
        if name not in state.serialized_attributes or name == "model":
            continue
        if name == "optimizers":
            load_optimizers(state, value, strict=True)
        elif name == "train_metrics":
            _load_metrics(state.train_metrics, value, state.device.module_to_device)
        elif name == "eval_metrics":
            for label, metrics in value.items():
                _load_metrics(state.eval_metrics.get(label, {}), metrics, state.device.module_to_device)
        elif name == "algorithms":
            _load_named(name, _named(state.algorithms), dict(_numbered(value)))
        elif name in _COLLECTIONS:
            _load_named(name, _named(getattr(state, name)), value)
        elif name in ("scaler", "timestamp"):
            target = getattr(state, name)
            if target is not None:
                _load_named(name, [(type(target).__qualname__, target)], value)
        else:
            setattr(state, name, value)


def load_model(state: State, saved: dict[str, Any], strict: bool) -> None:
    """Restore the model's parameters and buffers."""
    weights = saved["model"]
    if saved.get("is_model_ddp"):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    module: Any = state.model.module if state.is_model_ddp else state.model
    missing, unexpected = module.load_state_dict(weights, strict=strict)
    if missing or unexpected:
        warnings.warn(
            f"The saved model does not match this one. Missing in the file: {missing}. Unknown here: {unexpected}.",
            stacklevel=3,
        )


def load_optimizers(state: State, saved: dict[str, Any], strict: bool) -> None:
    """Restore the optimizers by class name.

    Raises:
        KeyError: `strict`, and the saved optimizer holds other parameters than this one.
    """
    for name, optimizer in _named(state.optimizers):
        if name not in saved:
            _warn_absent("optimizers", name)
            continue
        names = _parameter_names(state, optimizer)
        index = {parameter: i for i, parameter in enumerate(names)}
        differing = set(names).symmetric_difference(p for g in saved[name]["param_groups"] for p in g["params"])
        if strict and differing:
            raise KeyError(
                f"The saved {name} and this one hold different parameters: {', '.join(sorted(differing))}. Apply the "
                f"same algorithms and build the optimizer from the same parameters."
            )
        groups, start = [], 0
        for own, group in zip(optimizer.param_groups, saved[name]["param_groups"], strict=True):
            groups.append({**group, "params": list(range(start, start + len(own["params"])))})
            start += len(own["params"])
        states = {index[p]: value for p, value in saved[name]["state"].items() if p in index}
        optimizer.load_state_dict({**saved[name], "state": states, "param_groups": groups})


def _named(objects: Iterable[Any]) -> list[tuple[str, Any]]:
    return list(_numbered((type(o).__qualname__, o) for o in objects))


def _numbered(pairs: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    count: dict[str, int] = {}
    for name, value in pairs:
        count[name] = count.get(name, 0) + 1
        yield (name if count[name] == 1 else f"{name}#{count[name]}"), value


def _load_named(attribute: str, objects: Iterable[tuple[str, Any]], saved: dict[str, Any]) -> None:
    for name, target in objects:
        if name in saved:
            target.load_state_dict(saved[name])
        else:
            _warn_absent(attribute, name)


def _warn_absent(attribute: str, name: str) -> None:
    warnings.warn(
        f"{name} of `{attribute}` is not in the state_dict that is being loaded; its own state is kept.", stacklevel=4
    )


def _metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    saved = {}
    for name, metric in metrics.items():
        metric.persistent(mode=True)
        saved[name] = {"state_dict": metric.state_dict(), "_computed": metric._computed}
    return saved


def _load_metrics(
    metrics: dict[str, Any], saved: dict[str, Any], to_device: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    for name, metric in metrics.items():
        if name not in saved:
            _warn_absent("metrics", name)
            continue
        metric.persistent(mode=True)
        metric.load_state_dict(saved[name]["state_dict"], strict=False)
        metric._computed = saved[name]["_computed"]
        metric._update_count += 1  # otherwise torchmetrics warns that nothing was updated
        to_device(metric)


def _integrations(state: State) -> dict[str, Any]:
    get_metadata = getattr(state.model, "get_metadata", None)  # language models carry their tokenizer and config
    return {} if get_metadata is None else {"huggingface": get_metadata()}
