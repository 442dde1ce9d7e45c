"""LoRA adapters of `peft`: their entries in a state dict, and saving and loading only these.

The names of an adapted model, below `base_model.model.`::

    h.0.attn.c_attn.base_layer.weight         the frozen layer; its bias likewise
    h.0.attn.c_attn.lora_A.default.weight     the adapter "default"; lora_B likewise
    wte.lora_embedding_A.default              the same of an embedding
    score.original_module.weight              a fully trained layer: its original weight
    score.modules_to_save.default.weight      and its trained weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from composer.utils import MissingConditionalImportError

peft_installed = find_spec("peft") is not None
"""True if the library `peft` is installed."""

_OF_ADAPTERS = ("modules_to_save", "trainable_tokens_delta")


def import_peft() -> Any:
    """Import the library `peft`.

    Raises:
        MissingConditionalImportError: It is not installed.
    """
    try:
        return import_module("peft")
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingConditionalImportError(extra_deps_group="peft", conda_package="peft") from error


def is_adapted(model: Any) -> bool:
    """Return True if a model is a `PeftModel`."""
    return peft_installed and isinstance(model, import_peft().PeftModel)


def adapted(model: Any, peft_config: Any) -> Any:
    """Add an adapter to a model and return the adapted model.

    Raises:
        MissingConditionalImportError: `peft` is not installed.
        ValueError: The adapter is not LoRA, or the model has one already.
    """
    peft = import_peft()
    if is_adapted(model):
        raise ValueError(
            "`peft_config` must be None for a model that is a `PeftModel`, which has an adapter. Pass one of the two."
        )
    check_lora(peft_config.peft_type)
    return peft.get_peft_model(model, peft_config)


def check_lora(kind: Any) -> None:
    """Raise a ValueError for adapter types other than LoRA."""
    name = str(getattr(kind, "value", kind)).upper()
    if name != "LORA":
        raise ValueError(f"`peft_config` must be of the type LORA, got {name}. Use a `peft.LoraConfig`.")


def maybe_get_underlying_model(model: Any) -> Any:
    """Return the model of `transformers` inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if is_adapted(model) else model


def filter_state_dict_peft(
    state_dict: Mapping[str, Any],
    peft_config: Any,
    adapter_name: str = "default",
    remove_adapter_names: bool = True,
) -> dict[str, Any]:
    """Return the entries of a state dict that belong to a LoRA adapter.

    These are the adapter's matrices, fully trained layers (`modules_to_save`), and the biases that `peft_config.bias`
    makes trainable: `"none"`, those of adapted layers (`"lora_only"`), or `"all"`.

    Args:
        state_dict: The state of a `PeftModel`, or of a module that contains one.
        peft_config: The adapter's configuration.
        adapter_name: The adapter's name.
        remove_adapter_names: Return the names of `peft`'s files, without the name of the adapter.

    Returns:
        The entries, in order; tensors are not copied.

    Raises:
        ValueError: `peft_config` is not LoRA, or its `bias` is unknown.
    """
    check_lora(peft_config.peft_type)
    bias = getattr(peft_config, "bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise ValueError(f"`peft_config.bias` must be 'none', 'all' or 'lora_only', got {bias!r}.")
    layers = {key.partition(".lora_")[0] for key in state_dict if ".lora_" in key}
    entries = {}
    for key, value in state_dict.items():
        if _belongs_to(key, adapter_name) or _is_trained_bias(key, bias, layers):
            entries[_without_adapter(key, adapter_name) if remove_adapter_names else key] = value
    return entries


def _belongs_to(key: str, adapter: str) -> bool:
    parts = key.split(".")
    for part, following in pairwise(parts):
        if part.startswith("lora_") or part in _OF_ADAPTERS:
            return following == adapter
    return False


def _is_trained_bias(key: str, bias: str, layers: set[str]) -> bool:
    if bias == "none" or not (key == "bias" or key.endswith(".bias")):
        return False
    parts = key.split(".")
    if "original_module" in parts or any(part.startswith("lora_") or part in _OF_ADAPTERS for part in parts):
        return False
    layer = key.removesuffix(".bias").removesuffix(".base_layer")
    return bias == "all" or layer in layers


def _without_adapter(key: str, adapter: str) -> str:
    parts: list[str] = []
    for part in key.split("."):
        previous = parts[-1] if parts else ""
        if part == adapter and (previous.startswith("lora_") or previous in _OF_ADAPTERS):
            if previous == "modules_to_save":  # files have the original name of the layer
                parts.pop()
            continue
        parts.append(part)
    return ".".join(parts)


def peft_filter_state_dict_trainable(state_dict: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return the trainable entries of a module's state, for any type of adapter.

    Args:
        state_dict: The state of `module`.
        module: The module.

    Returns:
        The entries of parameters that require gradients, in order; tensors are not copied.
    """
    names = {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
    return {name: value for name, value in state_dict.items() if name in names}


def check_adapters(model: Any) -> None:
    """Raise a ValueError for a `PeftModel` with adapters other than LoRA."""
    for config in model.peft_config.values():
        check_lora(config.peft_type)


def save_adapters_only(module: torch.nn.Module) -> None:
    """Restrict the state dict of a module, whose child `model` is a `PeftModel`, to the adapters.

    Loading it does not change other weights, also with `strict=True`. A complete state dict is loaded completely.
    """
    module.register_state_dict_post_hook(_drop_base)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_expect_no_base)  # type: ignore[no-untyped-call]


def names_of_adapters(model: Any, state_dict: Iterable[str]) -> set[str]:
    """Return the names in a state dict that belong to the adapters of a `PeftModel`."""
    names: dict[str, Any] = dict.fromkeys(state_dict)
    return set().union(*(filter_state_dict_peft(names, own, name, False) for name, own in model.peft_config.items()))


def _drop_base(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    inner = f"{prefix}model."
    own = [name for name in state_dict if name.startswith(inner)]
    for name in set(own) - names_of_adapters(module.model, own):
        del state_dict[name]


def _expect_no_base(module: torch.nn.Module, incompatible_keys: Any) -> None:
    # Not `module.state_dict()`, whose hook removes the base.
    inner: Any = module.model
    names = [f"model.{name}" for name, _ in inner.named_parameters(remove_duplicate=False)]
    names += [f"model.{name}" for name, _ in inner.named_buffers(remove_duplicate=False)]
    base = set(names) - names_of_adapters(inner, names)
    missing = incompatible_keys.missing_keys
    missing[:] = [name for name in missing if not _ends_in(name, base)]


def _ends_in(name: str, known: set[str]) -> bool:
    """Return True if a name, or a suffix after a dot, is known: the module may be inside another one."""
    while name not in known:
        _, dot, name = name.partition(".")
        if not dot:
            return False
    return True
