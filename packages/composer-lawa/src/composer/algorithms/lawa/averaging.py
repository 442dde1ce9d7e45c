"""Averages of several sets of weights: models, dictionaries of tensors, or checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from composer.algorithms.utils.stored_weights import average_dtype, is_averaged_buffer
from composer.utils import check_integers, is_uri, local_part, unwrapped_model
from composer.utils.import_helpers import import_from_distribution

_BATCH_IN_NAME = re.compile(r"(?<![A-Za-z])ba(\d+)")
# The names that `torch.nn.utils.parametrizations.spectral_norm` gives to its power-iteration vectors.
_POWER_ITERATION = re.compile(r"(?:.*\.)?parametrizations\.[^.]+\.\d+\._[uv]")


@torch.no_grad()
def average_weights(
    weights: Iterable[torch.nn.Module | Mapping[str, torch.Tensor]],
    coefficients: Sequence[float] | None = None,
    *,
    buffers: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the mean of several sets of weights, or a linear combination.

    Load it with `model.load_state_dict(average_weights(...))`. Batch norm statistics should be recalibrated afterwards,
    with `composer.functional.recalibrate_batchnorm`.

    Args:
        weights: Models, or dictionaries such as their `state_dict()`, of the same structure; not modified. They are
            taken one by one, so a generator needs memory for one of them at a time.
        coefficients: A factor for each of them. None: the mean.
        buffers: The names of the buffers. Only those that are running statistics are averaged, and the others are
            those of the last set. None: the buffers of the first set if it is a model; in a dictionary, which does not
            tell buffers from parameters, only the power-iteration vectors of spectral norms are recognized.

    Returns:
        The averages by name: new tensors, on the devices of the first set, sharded like it, and in float32 where its
        dtype has less precision. Integers, such as counters, are those of the last set.

    Raises:
        ValueError: There are no weights, they have different names or shapes, or their number is not that of the
            coefficients.
        TypeError: An item is neither a module nor a dictionary.

    Example:
        >>> average_weights([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}])
        {'w': tensor([2.5000])}

    Source: Kaddour, "Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest Weight Averaging",
        arXiv:2209.14981, section 2.
    Differs: integers, and buffers other than running statistics, are copied.
    """
    total: dict[str, torch.Tensor] = {}
    copied: set[str] = set()
    count = 0
    for each in weights:
        named = _named(each)
        if count == 0:
            copied = _copied_names(each, named, buffers)
            dtypes = {n: v.dtype if n in copied else average_dtype(v.dtype) for n, v in named.items()}
            total = {name: torch.zeros_like(value, dtype=dtypes[name]) for name, value in named.items()}
        _check_match(total, named)
        if coefficients is not None and count == len(coefficients):
            raise ValueError(
                f"`coefficients` must be as many as the weights, got {len(coefficients)} for more weights."
            )
        factor = 1.0 if coefficients is None else float(coefficients[count])
        for name, tensor in named.items():
            target, value = local_part(total[name]), local_part(tensor.detach())
            if name in copied:
                target.copy_(value)
            else:
                target.add_(value.to(target.device, target.dtype), alpha=factor)
        count += 1
    if count == 0:
        raise ValueError("`weights` must have at least one set of weights, got none.")
    if coefficients is not None and count != len(coefficients):
        raise ValueError(f"`coefficients` must be as many as the weights, got {len(coefficients)} for {count}.")
    if coefficients is None:
        for name, tensor in total.items():
            if name not in copied:
                local_part(tensor).div_(count)
    return total


def average_checkpoints(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], num_last: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the mean of the models in several checkpoints; see `average_weights`.

    Needs `composer-checkpoint`, which reads the files without running code from them. One model at a time is in memory.

    Args:
        paths: Paths or URIs of checkpoints, each a file or a folder of shards, or one folder that contains them. In a
            folder, those named with the number of batches, such as `ep1-ba500-rank0.pt`, are used; links are not.
        num_last: Use only the last of them: those with the most batches in a folder, otherwise those at the end of
            `paths`. None: all.

    Returns:
        The averages by name, as `average_weights` returns them, on the CPU.

    Raises:
        ModuleNotFoundError: `composer-checkpoint` is not installed.
        FileNotFoundError: There is no such file or folder.
        ValueError: There are no checkpoints, fewer than `num_last`, or one without a model.

    Example:
        >>> weights = average_checkpoints("checkpoints", num_last=6)  # doctest: +SKIP
        >>> _ = model.load_state_dict(weights)  # doctest: +SKIP

    Source: Sanyal et al., "Early Weight Averaging meets High Learning Rates for LLM Pre-training", arXiv:2306.03241,
        section 3.
    Differs: none.
    """
    if num_last is not None:
        check_integers("None uses all.", num_last=num_last, least=1)
    read = import_from_distribution(
        "composer.checkpoint", "read_checkpoint", "composer-checkpoint", "composer.checkpoint.read_checkpoint"
    )
    found = _checkpoints_of(paths)
    if not found or (num_last is not None and num_last > len(found)):
        wanted = "at least one checkpoint" if num_last is None else f"{num_last} checkpoints"
        raise ValueError(
            f"`paths` must have {wanted}, got {len(found)} in {paths!r}. In a folder, the names must have the number "
            f"of batches, such as 'ep1-ba500-rank0.pt'; otherwise give the paths in order."
        )
    return average_weights(_models_in(found if num_last is None else found[-int(num_last) :], read))


def _models_in(paths: Sequence[str], read: Any) -> Iterator[Mapping[str, torch.Tensor]]:
    for path in paths:
        content = read(path, keys=["model"])
        state = content.get("state") if isinstance(content, Mapping) else None
        if not isinstance(state, Mapping) or "model" not in state:
            raise ValueError(f"`paths` must be checkpoints with a model, but {path!r} has none.")
        yield state["model"]


def _checkpoints_of(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the paths of checkpoints, the earliest first."""
    if not isinstance(paths, (str, os.PathLike)):
        return [os.fspath(path) for path in paths]
    text = os.fspath(paths)
    if is_uri(text):
        return [text]
    folder = Path(text).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"`paths` must exist, got {text!r}.")
    if folder.is_file():
        return [text]
    entries = [entry for entry in folder.iterdir() if not entry.is_symlink() and not entry.name.startswith(".")]
    numbered = [(int(match[1]), entry) for entry in entries if (match := _BATCH_IN_NAME.search(entry.name))]
    # A folder without such names may be a checkpoint itself, of shards.
    return [str(entry) for _, entry in sorted(numbered)] or [text]


def _named(weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named: Any = unwrapped_model(weights).state_dict() if isinstance(weights, torch.nn.Module) else weights
    if not isinstance(named, Mapping):
        raise TypeError(f"`weights` must be modules or dictionaries of tensors, got {type(weights).__name__}.")
    # Other values are extra state of modules, which cannot be averaged.
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _check_match(total: Mapping[str, torch.Tensor], named: Mapping[str, torch.Tensor]) -> None:
    different = sorted(total.keys() ^ named.keys())
    if different:
        raise ValueError(
            f"`weights` must all have the same names, but {', '.join(different[:5])} is not in all of them."
        )
    for name, tensor in named.items():
        if tensor.shape != total[name].shape:
            raise ValueError(
                f"`weights` must all have the same shapes, but {name!r} has {tuple(total[name].shape)} and "
                f"{tuple(tensor.shape)}."
            )


def _copied_names(
    weights: torch.nn.Module | Mapping[str, torch.Tensor],
    named: Mapping[str, torch.Tensor],
    buffers: Collection[str] | None,
) -> set[str]:
    """Return the names of the tensors that are copied from the last set, and not averaged."""
    if buffers is None and isinstance(weights, torch.nn.Module):
        buffers = {name for name, _ in unwrapped_model(weights).named_buffers()}
    copied = {name for name, tensor in named.items() if not (tensor.is_floating_point() or tensor.is_complex())}
    if buffers is not None:
        return copied | {name for name in buffers if not is_averaged_buffer(name)}
    # `torch.nn.utils.spectral_norm` keeps `weight_u` and `weight_v` beside `weight_orig`.
    return copied | {
        name
        for name in named
        if _POWER_ITERATION.fullmatch(name) or (name.endswith(("_u", "_v")) and f"{name[:-2]}_orig" in named)
    }
