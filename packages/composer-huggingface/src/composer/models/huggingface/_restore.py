"""Builds the model of a checkpoint again, with its weights, adapter and tokenizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer.models.huggingface._checkpoint import load_weights, weights_of
from composer.models.huggingface._files import tokenizer_of
from composer.models.huggingface._metadata import hf_state_of, instantiate, peft_config_of
from composer.models.huggingface._peft import filter_state_dict_peft, is_adapted

__all__ = ["Request", "restored", "without_adapter"]


@dataclass
class Request:
    """What is to be built.

    Attributes:
        kind: Another class than the saved one, or its path.
        overrides: What is to differ in the configuration.
        trust_remote_code: Whether code of the tokenizer's own may run.
        base_model: The model that was adapted, if the checkpoint does not have it.
        needs_base: Whether it is an error if nobody has it.
    """

    kind: type | str | None
    overrides: Mapping[str, Any] | None
    trust_remote_code: bool
    base_model: Any = None
    needs_base: bool = False


def restored(make: Callable[..., Any], content: Mapping[str, Any], request: Request, **kwargs: Any) -> Any:
    """The model of a checkpoint, in eval mode.

    Args:
        make: Makes a `HuggingFaceModel` of a model, a tokenizer, `peft_config=` and `kwargs`.
        content: The checkpoint.
        request: What is to be built.
        **kwargs: For `make`.
    """
    hf_state = hf_state_of(content)
    adapter, names = peft_config_of(hf_state), weights_of(content)
    is_partial = adapter is not None and len(filter_state_dict_peft(names, adapter)) == len(names)
    if is_partial and request.base_model is None:
        _miss_base(adapter, request.needs_base)
    tokenizer = tokenizer_of(hf_state.get("tokenizer") or {}, request.trust_remote_code)
    base = request.base_model
    if base is None:
        base = instantiate(hf_state, request.kind, request.overrides)
    model = make(base, tokenizer, peft_config=adapter, **kwargs)
    load_weights(model, content, strict=request.kind is None and not request.overrides, adapter_only=is_partial)
    return model.eval()


def _miss_base(adapter: Any, is_error: bool) -> None:
    known = adapter.base_model_name_or_path
    where = f"It was {known!r}. " if known else ""
    text = f"The checkpoint has the adapter only, not the weights of the model that was adapted. {where}"
    if is_error:
        raise ValueError(f"{text}Pass it as `base_model`, for example `AutoModelForCausalLM.from_pretrained(...)`.")
    warnings.warn(
        f"{text}The weights of the model that is returned are new. Use `HuggingFaceModel.from_composer_checkpoint` "
        f"with `base_model` for all of it.",
        stacklevel=4,
    )


def without_adapter(model: Any) -> Any:
    """The model of `transformers` as it was before it was adapted."""
    return model.unload() if is_adapted(model) else model
