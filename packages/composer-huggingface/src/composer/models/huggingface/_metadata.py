"""What a checkpoint says about the model of `transformers` in it, and what is built from that.

`state["integrations"]["huggingface"]` holds::

    {"model": {"config": {"file_extension": ".json", "content": {...}, "class": "transformers.models...."},
               "peft_config": {"file_extension": ".json", "content": {...}, "class": "peft...."}},
     "tokenizer": {"tokenizer.json": {"file_extension": ".json", "content": {...}}, ...}}
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers

from composer.models.huggingface._files import read_tokenizer
from composer.models.huggingface._peft import check_lora, import_peft, is_adapted, maybe_get_underlying_model
from composer.utils import import_object

__all__ = [
    "class_of",
    "config_of",
    "describe",
    "get_hf_config_from_composer_state_dict",
    "get_peft_config_from_composer_state_dict",
    "hf_state_of",
    "instantiate",
    "peft_config_of",
    "saved_class",
]

_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged_attention")


def describe(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What is saved of a model besides its weights; plain values only.

    Raises:
        ValueError: The tokenizer has a file of an unknown kind.
    """
    inner = maybe_get_underlying_model(model)
    config = json.loads(inner.config.to_json_string(use_diff=False))
    found = {"config": {"file_extension": ".json", "content": config, "class": _path_of(class_of(inner))}}
    if is_adapted(model):
        own = model.peft_config[model.active_adapter]
        with tempfile.TemporaryDirectory(prefix="composer-peft-") as folder:
            own.save_pretrained(folder)  # sets and enumerations become plain values
            content = json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8"))
        found["peft_config"] = {"file_extension": ".json", "content": content, "class": _path_of(type(own))}
    return {"model": found, "tokenizer": read_tokenizer(tokenizer)}


def class_of(model: Any) -> type:
    """The class of a model of `transformers`. Sharding gives it another one, derived from its own."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("torch.") or not issubclass(kind, transformers.PreTrainedModel):
            continue
        return kind
    return type(model)


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def hf_state_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a checkpoint says about its model of `transformers`.

    Raises:
        ValueError: It says nothing.
    """
    state = state_dict.get("state")
    integrations = state.get("integrations") if isinstance(state, Mapping) else None
    found = integrations.get("huggingface") if isinstance(integrations, Mapping) else None
    if not isinstance(found, Mapping) or "config" not in (found.get("model") or {}):
        raise ValueError(
            "The checkpoint does not say which model of `transformers` it holds (`state/integrations/huggingface`). "
            "Was it saved from a `HuggingFaceModel`?"
        )
    return found


def get_hf_config_from_composer_state_dict(
    state_dict: Mapping[str, Any], config_overrides: Mapping[str, Any] | None = None
) -> Any:
    """The configuration of the model in a checkpoint.

    Args:
        state_dict: The whole checkpoint, as it was loaded.
        config_overrides: What is to differ, such as `{"num_labels": 3}`.

    Returns:
        The configuration of `transformers`.

    Raises:
        ValueError: The checkpoint says nothing of it, of a type of model that is not known, or of attention whose code
            would be downloaded.
    """
    return config_of(hf_state_of(state_dict), config_overrides)


def config_of(hf_state: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Any:
    """`get_hf_config_from_composer_state_dict` of the part of a checkpoint that it needs."""
    saved = hf_state["model"]["config"]
    content = dict(saved["content"])
    _check_attention(content)
    config = _config_class(content, saved.get("class")).from_dict(content)
    for key, value in (overrides or {}).items():
        setattr(config, "_attn_implementation" if key == "attn_implementation" else key, value)
    return config


def _check_attention(content: Any) -> None:
    """Refuse a configuration that names attention of some repository, whose code would be downloaded and run."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if "_implementation" in str(key) and value is not None and value not in _ATTENTION:
            raise ValueError(
                f"The checkpoint's configuration has {key}={value!r}, whose code would be downloaded. Known ones are "
                f"{', '.join(_ATTENTION)}; set any other on the model once it is loaded, if you trust it."
            )
        _check_attention(value)


def _config_class(content: Mapping[str, Any], path: Any) -> Any:
    kind = str(content.get("model_type"))
    if kind in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[kind]
    config_class = getattr(_imported(path), "config_class", None)  # a class of the user's own
    if config_class is None:
        raise ValueError(
            f"The checkpoint holds a model of the type {kind!r} (class {path!r}), which `transformers` does not know. "
            f"Import the module of its class first."
        )
    return config_class


def _imported(path: Any) -> Any:
    """The model class of this path if its module is one of `transformers` or imported already; None otherwise.

    A checkpoint does not decide what is imported: importing runs code.
    """
    module, _, name = str(path).rpartition(".")
    if module.startswith("transformers.models."):
        try:
            import_module(module)
        except ImportError:
            return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def saved_class(hf_state: Mapping[str, Any]) -> Any:
    """The class of the model in a checkpoint, if that is one of `transformers` or imported already; None otherwise."""
    return _imported(hf_state["model"]["config"].get("class"))


def instantiate(hf_state: Mapping[str, Any], kind: type | str | None, overrides: Mapping[str, Any] | None) -> Any:
    """The model of a checkpoint, with new weights.

    Args:
        hf_state: What the checkpoint says.
        kind: Another class, or its path such as `"transformers.AutoModelForMaskedLM"`; None: the one that was saved.
        overrides: What is to differ in the configuration.

    Raises:
        ValueError: The class cannot be imported, or is none of a model.
    """
    config = config_of(hf_state, overrides)
    if kind is None:
        path = hf_state["model"]["config"].get("class")
        kind = saved_class(hf_state)
        if kind is None:
            raise ValueError(
                f"The class {path!r} of the checkpoint's model cannot be imported: it is neither a model of this "
                f"`transformers` nor of a module that is imported already. Import it, or pass "
                f"`model_instantiation_class`."
            )
    elif isinstance(kind, str):
        kind = _asked_for(kind)
    make: Any = getattr(kind, "from_config", kind)  # what finds the class by the configuration
    if not callable(make):
        raise ValueError(f"`model_instantiation_class` must be a class of a model, got {kind!r}.")
    return make(config)


def _asked_for(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return import_object(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`model_instantiation_class` {path!r} cannot be imported. Use the class, or a path such as "
            f"'transformers.AutoModelForCausalLM'."
        ) from error


def get_peft_config_from_composer_state_dict(state_dict: Mapping[str, Any]) -> Any:
    """The configuration of the adapter in a checkpoint.

    Args:
        state_dict: The whole checkpoint, as it was loaded.

    Returns:
        The configuration of `peft`, or None if the model has no adapter.

    Raises:
        MissingConditionalImportError: `peft` is not installed.
        ValueError: The checkpoint says nothing of its model, or the adapter is not LoRA.
    """
    return peft_config_of(hf_state_of(state_dict))


def peft_config_of(hf_state: Mapping[str, Any]) -> Any:
    """`get_peft_config_from_composer_state_dict` of the part of a checkpoint that it needs."""
    saved = hf_state["model"].get("peft_config")
    if saved is None:
        return None
    content = dict(saved["content"])
    for key in ("peft_type", "task_type"):
        if isinstance(content.get(key), str):
            content[key] = content[key].upper()
    check_lora(content.get("peft_type"))
    with tempfile.TemporaryDirectory(prefix="composer-peft-") as folder:
        Path(folder, "adapter_config.json").write_text(json.dumps(content, default=list), encoding="utf-8")
        return import_peft().PeftConfig.from_pretrained(folder)
