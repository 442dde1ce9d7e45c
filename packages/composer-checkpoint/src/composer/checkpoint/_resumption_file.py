"""The part of a checkpoint that a run needs besides its model and optimizers, in a file of its own."""

from __future__ import annotations

import collections
import datetime
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer.checkpoint._container import read_file
from composer.checkpoint._pickle_checks import UnsafeCheckpointError, check_pickle, check_view
from composer.checkpoint._safe_load import load_plain
from composer.checkpoint._seal import CorruptCheckpointError

__all__ = ["read_resumption"]


def read_resumption(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the file, running no code from it.

    Args:
        path: What `save_resumption_state_to_disk` wrote, or a plain pickle, as the reference writes.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is torn, truncated or altered.
        UnsafeCheckpointError: It holds types whose loading could run code.
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"There is no file {str(file)!r}.")
    with open(file, "rb") as opened:
        start = opened.read(4)
    try:
        content = read_file(file)[0] if start == b"PK\x03\x04" else _unpickled(file)
    except UnsafeCheckpointError as error:
        if "add_safe_globals" not in str(error):
            raise
        raise UnsafeCheckpointError(f"{error} (global not in allowlist)") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(file, f"it must hold a dictionary, but holds {type(content).__name__}")
    return content


def _unpickled(file: Path) -> Any:
    data = file.read_bytes()
    check_pickle(data, str(file))
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{str(file)!r}: {error}") from None
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(file, error.reason) from None
    except Exception as error:  # damaged pickles fail in many ways
        if isinstance(error, MemoryError):
            raise
        raise CorruptCheckpointError(file, f"its pickle cannot be read ({error})") from error


class _Unpickler(pickle.Unpickler):
    """Finds only what is listed. Functions are handed out as copies, so that a pickle cannot change the real ones."""

    def find_class(self, module: str, name: str) -> Any:
        found = _allowed().get(f"{module}.{name}")
        if found is None:
            raise UnsafeCheckpointError(
                f"it holds `{module}.{name}`, whose loading could run code, so nothing was loaded. If you trust the "
                f"file, allow it before loading: `torch.serialization.add_safe_globals([...])`."
            )
        return found


def _allowed() -> dict[str, Any]:
    """What may be loaded, by the name in the pickle."""
    numpy_functions = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    allowed: dict[str, Any] = {
        f"{module}.{name}": function
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, function in numpy_functions.items()
    }
    allowed |= {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype, "datetime.timedelta": datetime.timedelta}
    for kind in (set, frozenset, complex, bytearray, range, slice):
        allowed |= {f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__")}
    allowed |= {"collections.OrderedDict": collections.OrderedDict, "_codecs.encode": _encode}
    allowed |= {"torch.torch_version.TorchVersion": str, "torch.storage._load_from_bytes": _storage}
    allowed |= {"torch._utils._rebuild_tensor_v2": _tensor}
    for given in torch.serialization.get_safe_globals():
        value, name = given if isinstance(given, tuple) else (given, f"{given.__module__}.{given.__qualname__}")
        allowed[name] = value
    return allowed


def _encode(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


def _storage(content: bytes) -> Any:
    return load_plain(io.BytesIO(content), "a tensor of it")


def _tensor(*arguments: Any) -> torch.Tensor:
    storage, offset, size, stride = arguments[:4]
    check_view(storage.nbytes(), storage.element_size(), offset, size, stride, "a tensor of it")
    rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v2
    return rebuild(*arguments[:4], False, collections.OrderedDict())
