"""Loading pickles without running code from them."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import os
import pathlib
import pickle
import re
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from composer.checkpoint._pickle_checks import (
    UnsafeCheckpointError,
    check_pickle,
    check_torch_file,
    check_view,
    read_plain_values,
)
from composer.checkpoint.checksum import CheckedFile, CorruptCheckpointError, open_checked, parts_of_archive
from composer.checkpoint.names import check_nonempty_path

__all__ = [
    "UnsafeCheckpointError",
    "check_loadable",
    "load_pickle",
    "load_plain",
    "safe_torch_load",
    "unloadable",
]

_NAMES = re.compile(r"(?:GLOBAL|class|type) [`'\"]?([A-Za-z_][\w.]*\.\w+)")


def safe_torch_load(
    path: str | os.PathLike[str],
    map_location: str | torch.device = "cpu",
    load_monolith_rank0_only: bool = False,
) -> Any:
    """Check a file and load it with torch, running no code from it.

    Besides what `torch.load(weights_only=True)` allows, frozen sets, deques, dates and times, paths, decimals,
    fractions, UUIDs, and NumPy arrays of numbers, dates and text are loaded; more types after
    `torch.serialization.add_safe_globals([...])`.

    Args:
        path: A file that `torch.save` wrote.
        map_location: The device of the tensors.
        load_monolith_rank0_only: True if only global rank 0 loads; the others return None.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        UnsafeCheckpointError: It holds other types, which the message names; its pickle protocol is one that torch
            does not read safely; or loading it could take time or memory out of proportion to its size.
        MemoryError: It is larger than the free memory.
    """
    if load_monolith_rank0_only:
        from composer.utils import dist

        if dist.get_global_rank() != 0:
            return None
    check_nonempty_path("path", path)
    file = Path(path).expanduser()
    if not file.exists():
        raise FileNotFoundError(f"There is no checkpoint {str(file)!r}.")
    with open_checked(file) as checked:
        loaded = _load(file, checked, map_location)
    if checked.saved_as is None and isinstance(loaded, dict) and loaded.get("has_checksum"):
        reason = (
            "the checksum at its end is missing or altered (if you have changed and saved it yourself with "
            "`torch.save`, remove its entry 'has_checksum' before)"
        )
        raise CorruptCheckpointError(file, reason)
    return loaded


def _load(file: Path, checked: CheckedFile, map_location: str | torch.device) -> Any:
    check_torch_file(checked.file, str(file), checked.parts)
    checked.file.seek(0)
    with torch.serialization.safe_globals(_allowed()):
        try:
            # Not by the path, where another file may be by now. Reading from a file object also releases the GIL.
            return torch.load(checked.file, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise _refusal(file, error) from error
        except Exception as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                size = file.stat().st_size
                raise MemoryError(
                    f"The checkpoint {str(file)!r}, of {size} bytes, needs more memory than there is."
                ) from error
            if isinstance(error, OSError) or "CUDA" in str(error):
                raise
            raise CorruptCheckpointError(file, f"torch cannot read it ({str(error).partition(chr(10))[0]})") from error


def load_plain(stream: Any, what: str) -> Any:
    """Load what `torch.save` wrote, running no code from it.

    Args:
        stream: The bytes, read from the beginning.
        what: A name for them, for the message.

    Raises:
        UnsafeCheckpointError: They hold types that are not allowed.
        CorruptCheckpointError: They are damaged, or need more memory than there is.
    """
    check_torch_file(stream, what)
    stream.seek(0)
    with torch.serialization.safe_globals(_allowed()):
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            names = _listed(set(_NAMES.findall(str(error)))) or "anything but plain data"
            raise UnsafeCheckpointError(
                f"In a checkpoint, {what} holds {names}, whose loading could run code, so nothing was loaded.",
                reason=f"it holds {names}",
            ) from error
        except (RuntimeError, EOFError, ValueError, TypeError, AttributeError, LookupError, MemoryError) as error:
            raise CorruptCheckpointError(what, f"it cannot be read ({error})") from error


def check_loadable(content: Any) -> None:
    """Check that a checkpoint can be loaded again.

    Raises:
        TypeError: It cannot; the message has the paths of the first ten values, and the reasons.
    """
    problems = [f"at {where!r}, got {what}" for where, what in islice(unloadable(content), 10)]
    if problems:
        raise TypeError(
            f"A checkpoint must hold values that can be loaded again; {'; '.join(problems)}. Return plain values "
            f"(numbers, strings, tensors, lists, dicts) from `state_dict`, or leave these out with `save_ignore_keys`."
        )


def unloadable(content: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each value that would be refused when it is loaded again, and the reason.

    The content is pickled, without the data of its tensors, and loaded as a checkpoint.
    """
    yield from _unloadable(content, "", set())


def _unloadable(content: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    if type(content) in _ATOMS or id(content) in seen:  # values may be shared, or contain themselves
        return
    seen.add(id(content))
    reason, types = _refused(content)
    if reason is None:
        return
    values = content if type(content) in (list, tuple) else ()
    items: Iterable[tuple[Any, Any]] = content.items() if isinstance(content, dict) else enumerate(values)
    refused_inside = False
    for key, value in items:
        for hit in _unloadable(value, f"{path}/{key}".lstrip("/"), seen):
            refused_inside = True
            yield hit
    if refused_inside:
        return
    kind = f"a `{type(content).__module__}.{type(content).__qualname__}`"
    if types and _refused(content, allowing=types)[0] is None:
        yield (
            path,
            (
                f"{kind}. Loading it could run code, so it is refused unless these types are allowed first: "
                f"`torch.serialization.add_safe_globals([...])` with {_listed(types)}"
            ),
        )
    else:
        yield path, f"{kind} that cannot be loaded again: {reason}"


def _refused(content: Any, allowing: Iterable[str] = ()) -> tuple[str | None, list[str]]:
    """Return why a value could not be loaded, or None if it could; and which types would have to be allowed."""
    stream = io.BytesIO()
    try:
        torch.save(content, stream, pickle_module=pickle if isinstance(content, torch.Tensor) else _WITHOUT_DATA)
    except Exception as error:  # noqa: BLE001 - pickling runs the methods of any class
        return f"it cannot be pickled ({error})", []
    with torch.serialization.safe_globals([kind for name in allowing if (kind := _known(name)) is not None]):
        try:
            load_plain(stream, "it")
        except (UnsafeCheckpointError, CorruptCheckpointError) as error:
            stream.seek(0)
            with torch.serialization.safe_globals(_allowed()):
                return error.reason, torch.serialization.get_unsafe_globals_in_checkpoint(stream)
        except Exception as error:  # noqa: BLE001 - types that are allowed for a trial run code of their own
            return f"it cannot be loaded ({error})", []
    return None, []


class PlainPickler(pickle.Pickler):
    """Pickler that writes a deque as a call, because the safe loading of torch does not fill one."""

    def reducer_override(self, value: Any) -> Any:
        return (deque, (list(value), value.maxlen)) if type(value) is deque else NotImplemented


class _Pickler(PlainPickler):
    """Pickler that writes an empty tuple in place of tensors of the common kinds."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return super().reducer_override(value)
        if value.layout is torch.strided and not value.is_meta and type(value) in _KINDS:
            common = not value.is_nested and not value.is_quantized and value.nbytes <= value.untyped_storage().nbytes()
        else:
            common = type(value) in _KINDS or value.layout is torch.jagged or hasattr(value, "to_local")
        if common:
            return torch.Size, ((),)
        return NotImplemented


_KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN_TYPES = (  # of the standard library; creating one does nothing else
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(Path())),
)
_ATOMS = (type(None), bool, int, float, str, bytes)
_WITHOUT_DATA = SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def _refusal(path: Path, error: Exception) -> Exception:
    types = _refused_types(path, error)
    if types is None and (protocol := _protocol_of(path)) > 2:
        return UnsafeCheckpointError(
            f"The file {str(path)!r} is a pickle of protocol {protocol}, which the safe loading of torch does not "
            f"support completely: it is written for protocol 2. Nothing was loaded. If you trust the file, save it "
            f"again: `torch.save(torch.load(path, weights_only=False), path)`."
        )
    if types is None:
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        return CorruptCheckpointError(path, f"its pickle cannot be read ({reason})")
    unsupported = [name for name in types if name != "builtins.list" and _is_container(name)]
    advice = (
        "If you trust the file, allow these types before loading: `torch.serialization.add_safe_globals([...])`."
        if not unsupported
        else f"Allowing it would not help, as torch's safe loading does not fill {_listed(unsupported)}. If you "
        f"trust the file, read it with `torch.load(path, weights_only=False)`, which runs its code."
    )
    return UnsafeCheckpointError(
        f"The checkpoint {str(path)!r} holds {_listed(types)}, whose loading could run code, so nothing was loaded. "
        f"{advice} A checkpoint saved again with plain values (numbers, strings, tensors, lists, dicts) needs no "
        f"permission."
    )


def _is_container(name: str) -> bool:
    """Return True for a known class that an unpickler has to fill: torch's fills plain ones only."""
    kind = _known(name)
    return kind is not None and issubclass(kind, (dict, list, set, deque))


def _known(name: str) -> type | None:
    """Return a class by its full name, if its module is imported already."""
    module, _, attribute = name.rpartition(".")
    kind = getattr(sys.modules.get(module), attribute, None)
    return kind if isinstance(kind, type) else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _protocol_of(path: Path) -> int:
    """Return the pickle protocol of a file that `torch.save` wrote; 0 for other files."""
    with open(path, "rb") as file:
        start = 0
        if file.read(2) == b"PK":
            parts = parts_of_archive(file, path)
            start = next(part.start for name, part in parts.items() if name.endswith("/data.pkl"))
        else:
            file.seek(0)
            if read_plain_values(file) != torch.serialization.MAGIC_NUMBER:
                return 0
        file.seek(start)
        return file.read(2)[1]


def _refused_types(path: Path, error: Exception) -> list[str] | None:
    """Return the types that are not allowed; None if the file was refused for another reason."""
    try:
        types = list(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 - a file in an old format; the error's text names the type
        types = []
    return sorted(set(types or _NAMES.findall(str(error)))) or None


def _allowed() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """List the types that the state of a run holds besides tensors and plain values."""
    allowed: list[Any] = [bytes, frozenset, deque, np.ndarray, np.dtype, TorchVersion, *_PLAIN_TYPES]
    allowed += {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}  # arrays of objects hold pickles
    return [*allowed, *((function, name) for name, function in _numpy_functions().items())]


def _numpy_functions() -> dict[str, Any]:
    """Return the functions that build NumPy values by their names in pickles."""
    functions = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    # Files have the module path of the NumPy version that wrote them.
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    return {f"{module}.{name}": function for module in modules for name, function in functions.items()}


def load_pickle(data: bytes, where: str) -> Any:
    """Load a plain pickle, such as one that the reference wrote, running no code from it.

    Args:
        data: The pickle.
        where: The name of the file, for messages.

    Raises:
        UnsafeCheckpointError: It holds types whose loading could run code.
        CorruptCheckpointError: It is damaged.
    """
    check_pickle(data, where)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{where!r}: {error}") from None
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(where, error.reason) from None
    except MemoryError:
        raise
    except Exception as error:  # damaged pickles fail in many ways
        raise CorruptCheckpointError(where, f"its pickle cannot be read ({error})") from error


class _Unpickler(pickle.Unpickler):
    """Unpickler of an allowlist. Functions are passed as copies, so that a pickle cannot change the real ones."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _allowed_in_pickles().get(f"{module}.{name}")
        if allowed is None:
            raise UnsafeCheckpointError(
                f"it holds `{module}.{name}`, whose loading could run code, so nothing was loaded. If you trust the "
                f"file, allow it before loading: `torch.serialization.add_safe_globals([...])`."
            )
        return allowed


def _allowed_in_pickles() -> dict[str, Any]:
    """Return the allowed types and functions by their names in pickles."""
    allowed = _numpy_functions()
    allowed |= {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype, "datetime.timedelta": datetime.timedelta}
    for kind in (set, frozenset, complex, bytearray, range, slice):
        allowed |= {f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__")}
    allowed |= {"collections.OrderedDict": collections.OrderedDict, "_codecs.encode": _encode}
    allowed |= {"torch.torch_version.TorchVersion": str, "torch.storage._load_from_bytes": _load_storage}
    allowed |= {"torch._utils._rebuild_tensor_v2": _rebuild_tensor}
    for given in torch.serialization.get_safe_globals():
        value, name = given if isinstance(given, tuple) else (given, f"{given.__module__}.{given.__qualname__}")
        allowed[name] = value
    return allowed


def _encode(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


def _load_storage(content: bytes) -> Any:
    return load_plain(io.BytesIO(content), "a tensor of it")


def _rebuild_tensor(*arguments: Any) -> torch.Tensor:
    storage, offset, size, stride = arguments[:4]
    check_view(storage.nbytes(), storage.element_size(), offset, size, stride, "a tensor of it")
    rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v2
    return rebuild(*arguments[:4], False, collections.OrderedDict())
