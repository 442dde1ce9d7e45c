"""The keys of a saved state, and how each is saved and loaded.

- `model`: parameters and buffers by name, without the `module.` prefix of DDP.
- `optimizers`: `{class name: state}`, where the state is keyed by parameter name; see `optimizers`.
- `schedulers`, `callbacks`, `scaler`, `timestamp`: `{class name: state_dict()}`. A second object of the same class has
  the key `"Name#2"`.
- `algorithms`: a list of `(class name, state_dict())` in order.
- `train_metrics`, `eval_metrics`: only with `save_metrics`; see `metrics`.
- `dataset_state`: only if the training dataset has a method `state_dict(num_samples, from_beginning)`.
- `rank_zero_seed`, `run_name`: plain values.
- `integrations`, `metadata`: information for other libraries and for readers of the file.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from composer.core._registry import load as load_registered
from composer.core.logging import Logger, LoggerDestination, call_logger
from composer.core.passes import PassInput
from composer.core.saving.metrics import load_metrics, metrics_state
from composer.core.saving.optimizers import load_optimizers, named, numbered, optimizers_state
from composer.core.saving.required import add_required_algorithms
from composer.utils import dist
from composer.utils.misc import unwrapped_model

if TYPE_CHECKING:
    from composer.core.state import State

_COLLECTIONS = ("schedulers", "callbacks")
_log = logging.getLogger(__name__)


def model_state(state: State) -> dict[str, Any]:
    """Return the parameters and buffers of the model by name, without the `module.` prefix of DDP."""
    module = state.model.module if state.is_model_ddp else state.model
    result: dict[str, Any] = module.state_dict()  # type: ignore[union-attr]
    return result


def state_dict_of(state: State) -> dict[str, Any]:
    """Return the state dict of everything in `state.serialized_attributes`, and the metadata."""
    saved: dict[str, Any] = {}
    for name in state.serialized_attributes:
        value = _saved_attribute(state, name)
        if value is not None:
            saved[name] = value
    saved["integrations"] = integrations(state)
    saved["metadata"] = metadata(state)
    return saved


def _saved_attribute(state: State, name: str) -> Any:
    """Return the saved form of an attribute; None if it is not saved."""
    if name == "model":
        return model_state(state)
    if name == "optimizers":
        return optimizers_state(state)
    if name == "dataset_state":
        return _dataset_state(state)
    if name in ("train_metrics", "eval_metrics") and not state.save_metrics:
        return None
    value = getattr(state, name)
    if name == "train_metrics":
        return metrics_state(value)
    if name == "eval_metrics":
        return {label: metrics_state(metrics) for label, metrics in value.items()}
    if name == "algorithms":
        return [(type(a).__qualname__, a.state_dict()) for a in value]
    if name in _COLLECTIONS:
        return {
            name: (call_logger(o, "state_dict") or {}) if isinstance(o, LoggerDestination) else o.state_dict()
            for name, o in named(value)
        }
    if name in ("scaler", "timestamp") and value is not None:
        return {type(value).__qualname__: value.state_dict()}
    return value


def _dataset_state(state: State) -> dict[str, Any] | None:
    """Return the position of the training dataset in this epoch; None if the dataset has none."""
    save = getattr(getattr(state.train_dataloader, "dataset", None), "state_dict", None)
    if save is None:
        return None
    try:
        inspect.signature(save).bind(0, True)
    except TypeError:  # another signature: the state depends on the position of the loader
        return None
    return {"train": save(int(state.timestamp.sample_in_epoch), True), "eval": {}}


def integrations(state: State) -> dict[str, Any]:
    """Return the information with which other libraries can read the model."""
    # Language models provide their tokenizer and config. DDP and compiled models do not forward the method.
    get_metadata = getattr(unwrapped_model(state.model), "get_metadata", None)
    return {} if get_metadata is None else {"huggingface": get_metadata()}


def metadata(state: State) -> dict[str, Any]:
    """Return the versions, device and sizes of the current run."""
    info: dict[str, Any] = {}
    with suppress(ModuleNotFoundError):  # composer-checkpoint, which writes files, has it
        info["composer_env_info"] = load_registered("composer.utils", "get_composer_env_dict")()
    info |= {
        "torch_version": str(torch.__version__),
        "device": state.device.name,
        "precision": state.precision.value,
        "world_size": dist.get_world_size(),
        "device_train_microbatch_size": state.device_train_microbatch_size,
    }
    batch_size = getattr(state.train_dataloader, "batch_size", None)
    if batch_size is not None:
        info["train_dataloader_batch_size"] = batch_size
    return info


def upgrade_state_dict(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the current key names.

    In files of early releases of MosaicML's Composer some start with an underscore.
    """
    renamed = {"_is_model_ddp_wrapped": "is_model_ddp"}
    return {renamed.get(key, key.removeprefix("_")): value for key, value in saved.items()}


def load(
    state: State,
    saved: dict[str, Any],
    logger: Logger | None,
    strict: bool,
    exclude_algorithms: Sequence[str] | None,
    algorithm_passes: PassInput,
) -> None:
    """Restore a saved state. An object that the saved state lacks keeps its own state, with a warning."""
    saved = upgrade_state_dict(saved)
    if "model" in saved:
        load_model(state, saved, logger, strict, exclude_algorithms, algorithm_passes)
    # Sorted, algorithms come before optimizers, which some algorithms change when they are loaded.
    for name in sorted(saved):
        if name in state.serialized_attributes and name not in ("model", "integrations", "metadata"):
            _load_attribute(state, name, saved[name])


def _load_attribute(state: State, name: str, value: Any) -> None:
    to_device = state.device.module_to_device
    if name == "optimizers":
        load_optimizers(state, value, strict=True)
    elif name == "train_metrics":
        load_metrics(state.train_metrics, value, to_device)
    elif name == "eval_metrics":
        for label, metrics in value.items():
            load_metrics(state.eval_metrics.get(label, {}), metrics, to_device)
    elif name in ("algorithms", *_COLLECTIONS):
        # A dictionary of algorithms is from an early release of MosaicML's Composer; `get_resumption_state_dict` gives
        # lists.
        pairs = value.items() if isinstance(value, dict) else value
        _load_named(name, named(getattr(state, name)), dict(numbered(pairs)))
    elif name in ("scaler", "timestamp"):
        target = getattr(state, name)
        if target is not None and value:
            own = next(iter(value.values()))  # `{class name: state_dict()}`, or the `state_dict()` alone
            target.load_state_dict(own if isinstance(own, dict) else value)
    elif name == "dataset_state" and value is not None:
        state.dataset_state = value
        state._load_dataset_state()
    elif name == "run_name" and (os.path.isabs(value) or ".." in value.replace("\\", "/").split("/")):
        raise ValueError(
            f"The saved `run_name` must not lead out of the folders that are named after it, got {value!r}. Load the "
            f"rest with `load_ignore_keys=['state/run_name']`."
        )
    else:
        setattr(state, name, value)


def load_model(
    state: State,
    saved: dict[str, Any],
    logger: Logger | None,
    strict: bool,
    exclude_algorithms: Sequence[str] | None,
    algorithm_passes: PassInput,
) -> None:
    """Apply the required algorithms, then restore the parameters and buffers of the model."""
    weights = saved["model"]
    if weights is None:  # they are on another rank
        return
    add_required_algorithms(state, saved, logger, exclude_algorithms, algorithm_passes)
    if saved.get("is_model_ddp"):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    module: Any = state.model.module if state.is_model_ddp else state.model
    try:
        missing, unexpected = module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        own = module.state_dict()
        resized = [key for key in weights if key in own and own[key].shape != weights[key].shape]
        if not resized:
            raise
        modules = dict.fromkeys(f"{key.rpartition('.')[0]}.*" if "." in key else key for key in resized)
        patterns = [f"state/model/{module}" for module in modules]
        raise RuntimeError(
            f"{error}\nTo load the rest and keep the parameters of this model where the sizes differ, pass "
            f"`load_ignore_keys={patterns!r}`."
        ) from error
    if missing or unexpected:
        warnings.warn(
            f"The saved model does not match this one. Missing in the file: {missing}. Not in the model: {unexpected}.",
            stacklevel=4,
        )


def _load_named(attribute: str, objects: Iterable[tuple[str, Any]], saved: dict[str, Any]) -> None:
    objects = list(objects)
    missing = saved.keys() - {name for name, _ in objects}
    if attribute == "algorithms" and missing:
        _log.warning(
            "The checkpoint was saved with %s, which this run does not have. If it averaged weights, the run starts "
            "from the averages, with the optimizer of other weights: pass it again, or `load_weights_only=True`.",
            ", ".join(sorted(missing)),
        )
    for name, target in objects:
        if isinstance(target, LoggerDestination):  # a new one, such as a progress bar, needs no saved state
            if name in saved:
                call_logger(target, "load_state_dict", saved[name])
        elif name in saved:
            target.load_state_dict(saved[name])
        elif target.state_dict():
            warnings.warn(
                f"{name} of `{attribute}` is not in the state_dict and keeps its current state.",
                stacklevel=5,
            )
