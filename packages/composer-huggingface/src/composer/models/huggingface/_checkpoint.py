"""Conversion of checkpoints to models, tokenizers and folders of `transformers`."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer.core import Precision, State
from composer.core.saving import add_required_algorithms, required_on_load
from composer.models.huggingface._files import write_files
from composer.models.huggingface._metadata import config_of, hf_state_of, peft_config_of, saved_class
from composer.models.huggingface._peft import filter_state_dict_peft, names_of_adapters
from composer.utils import dist
from composer.utils.import_helpers import import_from_distribution

log = logging.getLogger(__name__)

_NEEDED = ("model", "integrations", "algorithms", "metadata", "is_model_ddp", "_is_model_ddp_wrapped")
_CHILD = "model."


def read(path: str | os.PathLike[str], local_path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Read the required entries of a checkpoint without running code from it.

    Args:
        path: The checkpoint: a path or a URI.
        local_path: Save a copy here, or a link to a local checkpoint. None: no copy.

    Raises:
        ModuleNotFoundError: `composer-checkpoint`, which reads checkpoints, is not installed.
        FileNotFoundError: The checkpoint does not exist.
        FileExistsError: `local_path` exists.
        ValueError: It has no model of `transformers`.
    """
    owner = "composer-checkpoint", "composer.checkpoint.read_checkpoint"
    if local_path is not None:
        if dist.get_local_rank() == 0:
            import_from_distribution("composer.utils", "get_file", *owner)(path, local_path)
        dist.barrier()
        path = local_path
    content = import_from_distribution("composer.checkpoint", "read_checkpoint", *owner)(path, _NEEDED)
    if not isinstance(content, dict):
        raise ValueError(f"{os.fspath(path)!r} is not a checkpoint of a run.")
    hf_state_of(content)
    return content


def weights_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in a checkpoint by their names in a `HuggingFaceModel`.

    Raises:
        ValueError: It has no weights.
    """
    saved = content["state"]
    if not isinstance(saved.get("model"), Mapping):
        raise ValueError("The checkpoint has no weights (`state/model`). Was it saved without them?")
    weights = dict(saved["model"])
    if saved.get("is_model_ddp") or saved.get("_is_model_ddp_wrapped"):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


def load_weights(model: Any, content: Mapping[str, Any], strict: bool, adapter_only: bool = False) -> None:
    """Load the weights of a checkpoint into a `HuggingFaceModel`; first change its layers as in the saved run.

    Args:
        model: The model.
        content: The checkpoint.
        strict: Require matching names and shapes. Otherwise other weights are skipped, with a log message.
        adapter_only: The checkpoint has only an adapter.

    Raises:
        RuntimeError: `strict`, and they do not match.
        ModuleNotFoundError: An algorithm changed the saved model, and its package is not installed.
    """
    weights, saved = weights_of(content), content["state"]
    metadata = saved.get("metadata")
    # Some algorithms act only in a lower precision, so they must see that of the saved run.
    precision = metadata.get("precision") if isinstance(metadata, Mapping) else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Automatically adding required_on_load", category=UserWarning)
        state = State(model=model, precision=precision or Precision.FP32)
        add_required_algorithms(state, dict(saved), None, None, None)
    kinds = {value.dtype for value in weights.values() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    if len(kinds) == 1:  # the dtype in the configuration may be lower
        model.to(kinds.pop())
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    fitting = weights if strict else {k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}
    missing, unexpected = model.load_state_dict(fitting, strict=False)
    if adapter_only:
        missing = sorted(names_of_adapters(model.model, missing))
    unexpected = unexpected if strict else sorted(weights.keys() - fitting.keys())
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"The weights of the checkpoint do not fit the model. Missing in the checkpoint: {missing}; unknown to the "
            f"model: {unexpected}. A checkpoint saved with `weights_only` does not list algorithms that change layers."
        )
    if missing or unexpected:
        log.warning("Not in the checkpoint, newly initialized: %s. In the checkpoint, unused: %s.", missing, unexpected)


def write_huggingface_pretrained_from_composer_checkpoint(
    checkpoint_path: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    local_checkpoint_save_location: str | os.PathLike[str] | None = None,
    *,
    safe_serialization: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Write a checkpoint of a `HuggingFaceModel` as a folder for `from_pretrained` of `transformers`.

    The folder has the configuration, the weights (`pytorch_model.bin`) and the tokenizer, if there is one. For a model
    with a LoRA adapter, it has the adapter (`adapter_model.bin`, `adapter_config.json`) for
    `PeftModel.from_pretrained` instead of the weights. The model is not built. With several ranks, rank 0 writes.

    Args:
        checkpoint_path: The checkpoint: a path or a URI.
        output_folder: The folder, created if it does not exist; files of the same names are replaced.
        local_checkpoint_save_location: Save a downloaded checkpoint here. None: do not save it.
        safe_serialization: Write weights as safetensors (`model.safetensors`).
        trust_remote_code: Also write custom code of the tokenizer.

    Raises:
        FileNotFoundError: The checkpoint does not exist.
        CorruptCheckpointError: It is truncated or altered.
        UnsafeCheckpointError: It has types whose loading could run code.
        ValueError: It has no model of `transformers`, or a tokenizer that is not safe to write.
        ModuleNotFoundError: `composer-checkpoint` is not installed.

    Warns:
        UserWarning: The run had changed the layers of the model, which `transformers` does not know.
    """
    content = read(checkpoint_path, local_checkpoint_save_location)
    entries = content["state"].get("algorithms")
    names = [entry[0] for entry in entries] if isinstance(entries, list) else []
    changed = [name for name in names if name in required_on_load()]
    if changed:
        warnings.warn(
            f"The run changed the layers of the model ({', '.join(changed)}), and `transformers` builds it without "
            f"that. Load it with `HuggingFaceModel.from_composer_checkpoint`, or apply the same to what "
            f"`from_pretrained` returns and load the weights again.",
            stacklevel=2,
        )
    if dist.get_global_rank() == 0:
        _write(content, Path(output_folder).expanduser(), safe_serialization, trust_remote_code)
    dist.barrier()


def _write(content: Mapping[str, Any], folder: Path, as_safetensors: bool, trust_remote_code: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    hf_state = hf_state_of(content)
    config = config_of(hf_state)
    config.architectures = [str(hf_state["model"]["config"].get("class")).rpartition(".")[2]]
    write_files(hf_state.get("tokenizer") or {}, folder, trust_remote_code)
    config.save_pretrained(folder)
    weights = {
        name.removeprefix(_CHILD): value for name, value in weights_of(content).items() if name.startswith(_CHILD)
    }
    weights = _without_tied(weights, hf_state, config)
    adapter = peft_config_of(hf_state)
    name = "model" if as_safetensors else "pytorch_model"
    if adapter is not None:
        adapter.save_pretrained(str(folder))
        weights, name = filter_state_dict_peft(weights, adapter), "adapter_model"
    _save(weights, folder / f"{name}{'.safetensors' if as_safetensors else '.bin'}", as_safetensors)


def _without_tied(weights: dict[str, Any], hf_state: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Remove tied duplicates of weights: some releases of `transformers` do not tie weights that a file has twice."""
    patterns = list(getattr(saved_class(hf_state), "_tied_weights_keys", None) or ())
    if not (patterns and getattr(config.get_text_config(), "tie_word_embeddings", True)):
        return weights
    unique: dict[str, Any] = {}
    for name, value in weights.items():
        is_tied = any(re.search(pattern, name) for pattern in patterns)
        alike = (other for other in unique.values() if other.shape == value.shape and other.dtype == value.dtype)
        if not (is_tied and any(torch.equal(value, other) for other in alike)):
            unique[name] = value
    return unique


def _save(weights: dict[str, Any], path: Path, as_safetensors: bool) -> None:
    """Write to a temporary file and rename it, so that an existing file is replaced only by a complete one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        if as_safetensors:
            from safetensors.torch import save_file

            # Tensors in safetensors must not share memory.
            save_file({k: v.clone().contiguous() for k, v in weights.items()}, temporary, metadata={"format": "pt"})
        else:
            torch.save(weights, temporary)
        temporary.chmod(mode)  # `save_file` lets only the owner read it, whatever the umask
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
