"""Description of a model of `transformers` in a checkpoint, and construction from it.

`state["integrations"]["huggingface"]` is::

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

_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "paged_attention")


def describe(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the description of a model to save with its weights, in plain values.

    Raises:
        ValueError: The tokenizer has a file of an unsupported type.
    """
    inner = maybe_get_underlying_model(model)
    config = json.loads(inner.config.to_json_string(use_diff=False))
    description = {"config": {"file_extension": ".json", "content": config, "class": _path_of(class_of(inner))}}
    if is_adapted(model):
        adapter = model.peft_config[model.active_adapter]
        with tempfile.TemporaryDirectory(prefix="composer-peft-") as folder:
            adapter.save_pretrained(folder)  # converts sets and enums to plain values
            content = json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8"))
        description["peft_config"] = {"file_extension": ".json", "content": content, "class": _path_of(type(adapter))}
    return {"model": description, "tokenizer": read_tokenizer(tokenizer)}


def class_of(model: Any) -> type:
    """Return the class of a model of `transformers`, also if sharding replaced it by a subclass."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("torch.") or not issubclass(kind, transformers.PreTrainedModel):
            continue
        return kind
    return type(model)


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def hf_state_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of the model of `transformers` in a checkpoint.

    Raises:
        ValueError: There is none.
    """
    state = state_dict.get("state")
    integrations = state.get("integrations") if isinstance(state, Mapping) else None
    hf_state = integrations.get("huggingface") if isinstance(integrations, Mapping) else None
    if not isinstance(hf_state, Mapping) or "config" not in (hf_state.get("model") or {}):
        raise ValueError(
            "The checkpoint does not describe a model of `transformers` (`state/integrations/huggingface`). Was it "
            "saved from a `HuggingFaceModel`?"
        )
    return hf_state


def get_hf_config_from_composer_state_dict(
    state_dict: Mapping[str, Any], config_overrides: Mapping[str, Any] | None = None
) -> Any:
    """Return the configuration of the model in a checkpoint.

    Args:
        state_dict: The loaded checkpoint.
        config_overrides: Values to change, such as `{"num_labels": 3}`.

    Returns:
        The configuration of `transformers`.

    Raises:
        ValueError: The checkpoint has no configuration, an unknown type of model, or attention whose code would be
            downloaded.
    """
    return config_of(hf_state_of(state_dict), config_overrides)


def config_of(hf_state: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Any:
    """Return the configuration in the result of `hf_state_of`, with changed values."""
    saved = hf_state["model"]["config"]
    content = dict(saved["content"])
    _check_attention(content)
    kind = str(content.get("model_type"))
    if kind in transformers.CONFIG_MAPPING:
        config_class: Any = transformers.CONFIG_MAPPING[kind]
    else:  # a class of the user
        config_class = getattr(saved_class(hf_state), "config_class", None)
    if config_class is None:
        raise ValueError(
            f"The checkpoint has a model of the type {kind!r} (class {saved.get('class')!r}), which `transformers` "
            f"does not know. Import the module of its class first."
        )
    config = config_class.from_dict(content)
    for key, value in (overrides or {}).items():
        setattr(config, "_attn_implementation" if key == "attn_implementation" else key, value)
    return config


def _check_attention(content: Any) -> None:
    """Reject a configuration with attention from a repository, whose code would be downloaded and run."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        # transformers 4 also saved the flag `_attn_implementation_autoset`.
        named = "_implementation" in str(key) and value is not None and not isinstance(value, bool)
        if named and value not in _ATTENTION:
            raise ValueError(
                f"The checkpoint's configuration has {key}={value!r}, whose code would be downloaded. Supported are "
                f"{', '.join(_ATTENTION)}; if you trust another one, set it on the loaded model."
            )
        _check_attention(value)


def saved_class(hf_state: Mapping[str, Any]) -> Any:
    """Return the class of the model in a checkpoint, or None if it is not in `transformers` or imported already.

    A checkpoint must not cause other imports, which run code.
    """
    module, _, name = str(hf_state["model"]["config"].get("class")).rpartition(".")
    if module.startswith("transformers.models."):
        try:
            import_module(module)
        except ImportError:
            return None
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None


def instantiate(hf_state: Mapping[str, Any], kind: type | str | None, overrides: Mapping[str, Any] | None) -> Any:
    """Return the model of a checkpoint, with new weights.

    Args:
        hf_state: The result of `hf_state_of`.
        kind: Another class, or its path such as `"transformers.AutoModelForMaskedLM"`. None: the saved class.
        overrides: Values of the configuration to change.

    Raises:
        ValueError: The class cannot be imported, or is not a model class.
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
        module, _, name = kind.rpartition(".")
        try:
            kind = import_object(f"{module}:{name}")
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"`model_instantiation_class` {kind!r} cannot be imported. Use the class, or a path such as "
                f"'transformers.AutoModelForCausalLM'."
            ) from error
    make: Any = getattr(kind, "from_config", kind)  # an auto class
    if not callable(make):
        raise ValueError(f"`model_instantiation_class` must be a class of a model, got {kind!r}.")
    return make(config)


def get_peft_config_from_composer_state_dict(state_dict: Mapping[str, Any]) -> Any:
    """Return the configuration of the adapter in a checkpoint.

    Args:
        state_dict: The loaded checkpoint.

    Returns:
        The configuration of `peft`, or None if the model has no adapter.

    Raises:
        MissingConditionalImportError: `peft` is not installed.
        ValueError: The checkpoint has no description of its model, or the adapter is not LoRA.
    """
    return peft_config_of(hf_state_of(state_dict))


def peft_config_of(hf_state: Mapping[str, Any]) -> Any:
    """Return the configuration of the adapter in the result of `hf_state_of`, or None."""
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
