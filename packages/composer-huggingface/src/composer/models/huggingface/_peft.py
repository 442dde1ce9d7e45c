"""Adapters of `peft`: which entries of a model's state are theirs, and what is saved and loaded of it.

The names of a model that was adapted, below `base_model.model.`::

    h.0.attn.c_attn.base_layer.weight         the frozen layer; its bias likewise
    h.0.attn.c_attn.lora_A.default.weight     the adapter "default"; lora_B likewise
    wte.lora_embedding_A.default              the same of an embedding
    score.original_module.weight              a layer that is trained as a whole: what it was
    score.modules_to_save.default.weight      and what it is
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from composer.utils import MissingConditionalImportError

__all__ = [
    "adapted",
    "check_adapters",
    "check_lora",
    "filter_state_dict_peft",
    "import_peft",
    "is_adapted",
    "maybe_get_underlying_model",
    "names_of_adapters",
    "peft_filter_state_dict_trainable",
    "peft_installed",
    "save_adapters_only",
]

peft_installed = find_spec("peft") is not None
"""Whether the library `peft` is installed."""

_OF_ADAPTERS = ("modules_to_save", "trainable_tokens_delta")


def import_peft() -> Any:
    """The library `peft`.

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
    """Whether a model is a `PeftModel`."""
    return peft_installed and isinstance(model, import_peft().PeftModel)


def adapted(model: Any, peft_config: Any) -> Any:
    """The model with an adapter.

    Raises:
        MissingConditionalImportError: `peft` is not installed.
        ValueError: The adapter is none of LoRA, or the model has one.
    """
    peft = import_peft()
    if is_adapted(model):
        raise ValueError(
            "`peft_config` must be None for a model that is a `PeftModel`, which has its adapter. Pass one of the two."
        )
    check_lora(peft_config.peft_type)
    return peft.get_peft_model(model, peft_config)


def check_lora(kind: Any) -> None:
    """Refuse adapters other than LoRA.

    Raises:
        ValueError: It is another one.
    """
    name = str(getattr(kind, "value", kind)).upper()
    if name != "LORA":
        raise ValueError(f"`peft_config` must be of the type LORA, got {name}. Use a `peft.LoraConfig`.")


def maybe_get_underlying_model(model: Any) -> Any:
    """The model of `transformers` inside a `PeftModel`; any other model itself.

    Args:
        model: A model of either library.
    """
    return model.get_base_model() if is_adapted(model) else model


def filter_state_dict_peft(
    state_dict: Mapping[str, Any],
    peft_config: Any,
    adapter_name: str = "default",
    remove_adapter_names: bool = True,
) -> dict[str, Any]:
    """What of the state of an adapted model belongs to one of its LoRA adapters.

    That is the adapter's matrices, the layers that are trained as a whole (`modules_to_save`), and the biases that
    `peft_config.bias` makes trainable: `"none"`, those of adapted layers (`"lora_only"`), or `"all"`.

    Args:
        state_dict: The state of a `PeftModel`, or of something that contains one.
        peft_config: The adapter's configuration.
        adapter_name: The adapter's name.
        remove_adapter_names: Whether names are those of `peft`'s files, which do not say which adapter it is.

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
    found = {}
    for key, value in state_dict.items():
        if _is_of(key, adapter_name) or _is_trained_bias(key, bias, layers):
            found[_without_adapter(key, adapter_name) if remove_adapter_names else key] = value
    return found


def _is_of(key: str, adapter: str) -> bool:
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
            if previous == "modules_to_save":  # files have the name that the layer had
                parts.pop()
            continue
        parts.append(part)
    return ".".join(parts)


def peft_filter_state_dict_trainable(state_dict: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """What of a module's state is trained, whatever the kind of adapter.

    Args:
        state_dict: The state of `module`.
        module: The module.

    Returns:
        The entries of parameters that require gradients, in order; tensors are not copied.
    """
    names = {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
    return {name: value for name, value in state_dict.items() if name in names}


def check_adapters(model: Any) -> None:
    """Refuse a `PeftModel` with adapters other than LoRA.

    Raises:
        ValueError: It has one.
    """
    for config in model.peft_config.values():
        check_lora(config.peft_type)


def save_adapters_only(module: torch.nn.Module) -> None:
    """Let the state of a module, whose child `model` is a `PeftModel`, be that of the adapters.

    Loading it leaves the rest as it is, also with `strict=True`. A state that has the rest is loaded as a whole.
    """
    module.register_state_dict_post_hook(_drop_base)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_expect_no_base)  # type: ignore[no-untyped-call]


def names_of_adapters(model: Any, state_dict: Iterable[str]) -> set[str]:
    """Which names of the state of a module with this `PeftModel` belong to its adapters."""
    names: dict[str, Any] = dict.fromkeys(state_dict)
    kept = (filter_state_dict_peft(names, own, name, False) for name, own in model.peft_config.items())
    return set().union(*kept)


def _drop_base(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    inner = f"{prefix}model."
    own = [name for name in state_dict if name.startswith(inner)]
    for name in set(own) - names_of_adapters(module.model, own):
        del state_dict[name]


def _expect_no_base(module: torch.nn.Module, incompatible_keys: Any) -> None:
    # Not `module.state_dict()`, whose hook leaves the base out.
    inner: Any = module.model
    names = [f"model.{name}" for name, _ in inner.named_parameters(remove_duplicate=False)]
    names += [f"model.{name}" for name, _ in inner.named_buffers(remove_duplicate=False)]
    base = set(names) - names_of_adapters(inner, names)
    missing = incompatible_keys.missing_keys
    missing[:] = [name for name in missing if not _ends_in(name, base)]


def _ends_in(name: str, known: set[str]) -> bool:
    """Whether a name, or what follows one of its dots, is known: the module may be inside another one."""
    while name not in known:
        _, dot, name = name.partition(".")
        if not dot:
            return False
    return True
