"""Files of named tensors in the safetensors format, which other libraries read, too.

Tensors that share their data, such as tied weights, are stored once; the header lists the other names. It also holds a
checksum of all tensors, to detect an altered file: the format itself has none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer.checkpoint.durable import atomic_write, sync_file
from composer.checkpoint.safe_load import CorruptCheckpointError
from composer.checkpoint.selection import converted

_TIED, _CHECKSUM = "composer_tied", "composer_sha256"


def write_tensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    dtype: torch.dtype | None = None,
) -> None:
    """Write named tensors atomically: the file is complete and on the disk, or not there at all.

    Args:
        tensors: The tensors, on any device; not modified.
        path: The file.
        metadata: Further entries of the header.
        dtype: The data type to convert floating tensors to; None leaves them as they are.

    Raises:
        TypeError: A value is not a plain tensor.
        OSError: It cannot be written; an earlier file of this name is unchanged.
    """
    from safetensors.torch import save_file

    distinct, tied = _distinct(tensors, dtype)
    header = {"format": "pt", **metadata, _CHECKSUM: _checksum(distinct)}
    if tied:
        header[_TIED] = json.dumps(tied, sort_keys=True)
    with atomic_write(Path(path)) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(distinct, temporary, header)
        temporary.chmod(mode)  # `save_file` lets only the owner read it, whatever the umask
        sync_file(temporary)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read and check named tensors onto the CPU.

    Args:
        path: A file that `write_tensors` or another library wrote.

    Returns:
        The tensors, with all names of those that are tied, and the metadata of the header.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path).expanduser()
    if not file.exists():
        raise FileNotFoundError(f"There is no file {str(file)!r}.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = dict(opened.metadata() or {})
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is not a mapping
        tied = json.loads(metadata.pop(_TIED, "{}"))
        expected = metadata.pop(_CHECKSUM, None)
        if expected is not None and expected != _checksum(tensors):
            raise CorruptCheckpointError(file, "its checksum does not match its content")
        tensors |= {name: tensors[owner] for name, owner in tied.items()}
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(file, f"it cannot be read as safetensors ({error})") from error
    return tensors, metadata


def _distinct(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor once, contiguous on the CPU, and the names of its duplicates with the first name."""
    distinct: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        # Tensors without elements have no address, so they count as distinct.
        owner = first.setdefault(place, name) if tensor.numel() else name
        if owner != name:
            tied[name] = owner
            continue
        block = converted(tensor.detach(), dtype).cpu().contiguous()
        if block.untyped_storage().nbytes() != block.nbytes:  # a view of a larger tensor
            block = block.clone()
        distinct[name] = block
    return distinct, tied


def _check(name: str, tensor: Any) -> None:
    plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type == "meta" or hasattr(tensor, "to_local"):
        kind = type(tensor).__name__ if not isinstance(tensor, torch.Tensor) else f"a tensor on {tensor.device}"
        raise TypeError(
            f"`{name}` must be a dense tensor with values, whole on this rank, got {kind}: safetensors stores nothing "
            f"else. Leave it out with `ignore_keys=[{name!r}]`, or save in the format 'pt'."
        )


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of all names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
