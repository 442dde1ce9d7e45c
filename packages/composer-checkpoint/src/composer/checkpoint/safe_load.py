"""Loading what `torch.save` wrote without running code from it.

`torch.load(weights_only=True)` does that. We allow it some harmless types, and NumPy arrays, which need a check of
their own: NumPy trusts what a pickle says about the type of an array, and a forged type makes it take bytes of the file
for pointers to Python objects. So the pickle is first read without loading anything, and such types are refused.

Before torch 2.10, its safe loading has a known fault (CVE-2026-24747): load files of strangers with a newer torch.
"""

from __future__ import annotations

import codecs
import datetime
import decimal
import fractions
import io
import os
import pathlib
import pickle
import re
import struct
import uuid
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch.torch_version import TorchVersion

from composer.checkpoint.sharded_tensors import is_sharded
from composer.checkpoint.storage import without_password

_HEADER = 30  # bytes of the header of a part of an archive, without its name
# The records at the end of an archive; of the last one, only the length is needed.
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), 20

# The functions that build NumPy values, under the module paths of all NumPy versions.
_ARRAY, _SCALAR = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_NUMPY = {
    "numpy.core.multiarray._reconstruct": _ARRAY,
    "numpy._core.multiarray._reconstruct": _ARRAY,
    "numpy.core.multiarray.scalar": _SCALAR,
    "numpy._core.multiarray.scalar": _SCALAR,
}
# What the state of a run holds besides tensors and plain values; creating one does nothing else.
ALLOWED_TYPES: list[Any] = [
    *(bytes, frozenset, deque, np.ndarray, np.dtype, TorchVersion),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(Path())),
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"},
    *((function, name) for name, function in _NUMPY.items()),
]


class CorruptCheckpointError(RuntimeError):
    """A checkpoint file is incomplete or modified. Nothing was loaded."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(
            f"The checkpoint {without_password(os.fspath(path))!r} is damaged: {reason}. Nothing was loaded. Load "
            f"another one; `autoresume=True` finds the newest intact one."
        )
        self.path, self.reason = os.fspath(path), reason


class UnsafeCheckpointError(pickle.UnpicklingError):
    """Loading a checkpoint could run code. Nothing was loaded.

    Attributes:
        types: The full names of the types to allow; empty if that would not help.
    """

    def __init__(self, message: str, types: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.types = sorted(set(types))


class Part(NamedTuple):
    """The place of a part's data in a zip archive, in bytes, and their CRC-32."""

    start: int
    size: int
    crc: int


def parts_of_archive(file: IO[bytes], where: str | os.PathLike[str]) -> dict[str, Part]:
    """Return the parts of a zip archive by name, in the order of the archive.

    Only archives as `torch.save` writes them are accepted, with parts one after the other and not compressed. So the
    archive is as large as its content, and all readers see the same.

    Args:
        file: The archive.
        where: The name of the file, for the message.

    Raises:
        CorruptCheckpointError: It is not such an archive.
    """
    end, folded = file.seek(0, os.SEEK_END), set[str]()
    try:
        with zipfile.ZipFile(file) as archive:
            infos, following = archive.infolist(), archive.start_dir
            parts: dict[str, Part] = dict.fromkeys(archive.namelist(), Part(0, 0, 0))
            file.seek(tail := end - len(archive.comment) - _END.size)
        declared = _END.unpack(file.read(_END.size))[6]
        if declared == 0xFFFFFFFF:  # a large archive has it in another record, before the locator of that record
            file.seek(tail - _END_64.size - _LOCATOR)
            declared = _END_64.unpack(file.read(_END_64.size))[-1]
        if following != declared:
            raise CorruptCheckpointError(where, "its list of members is not at the recorded offset")
        for info in sorted(infos, key=attrgetter("header_offset"), reverse=True):
            file.seek(info.header_offset + _HEADER - 4)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
            start = info.header_offset + _HEADER + name_length + extra_length
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise CorruptCheckpointError(where, f"its member {info.filename!r} is compressed")
            if start + info.file_size > following:
                raise CorruptCheckpointError(where, f"its member {info.filename!r} overlaps with another")
            if info.filename.lower() in folded or info.orig_filename != info.filename:
                raise CorruptCheckpointError(where, "two of its members have one name")
            following = info.header_offset
            folded.add(info.filename.lower())
            parts[info.filename] = Part(start, info.file_size, info.CRC)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise CorruptCheckpointError(where, f"it is not a complete zip archive ({error})") from error
    return parts


def load_plain(file: IO[bytes], where: str, map_location: str | torch.device = "cpu") -> Any:
    """Load what `torch.save` wrote, running no code from it.

    Args:
        file: The bytes, read from the beginning.
        where: A name for them, for the message.
        map_location: The device of the tensors.

    Raises:
        UnsafeCheckpointError: They hold types that are not allowed.
        CorruptCheckpointError: They are damaged.
        MemoryError: They are larger than the free memory.
    """
    _check_numpy(file, where)
    known = torch.serialization.get_safe_globals()  # what the user has allowed, which leaving the block would forget
    with torch.serialization.safe_globals([each for each in ALLOWED_TYPES if each not in known]):
        try:
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise _refusal(file, where, error) from error
        except Exception as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                raise MemoryError(f"The checkpoint {where!r} needs more memory than there is.") from error
            if isinstance(error, OSError) or "CUDA" in str(error):
                raise
            raise CorruptCheckpointError(where, f"torch cannot read it ({str(error).partition(chr(10))[0]})") from error


def _check_numpy(file: IO[bytes], where: str) -> None:
    """Check the types of NumPy arrays in what `torch.save` wrote."""
    file.seek(0)
    try:
        if file.read(2) == b"PK":
            parts = parts_of_archive(file, where)
            file.seek(parts[next(iter(parts)).partition("/")[0] + "/data.pkl"].start)
        else:  # before 1.6, torch wrote a number, its version and a description of the system before the content
            file.seek(0)
            number, _, _ = (OutlineUnpickler(file).load() for _ in range(3))
            if number != torch.serialization.MAGIC_NUMBER:
                raise ValueError("`torch.save` has not written it")
        OutlineUnpickler(file).load()
    except CorruptCheckpointError:
        raise
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{where!r} {error}") from None
    except Exception as error:  # damaged pickles fail in many ways
        raise CorruptCheckpointError(where, f"its pickle cannot be read ({error!r})") from error


def _refusal(file: IO[bytes], where: str, error: Exception) -> UnsafeCheckpointError:
    try:
        file.seek(0)
        types = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001 - a file in the old format; the error's text names the type
        types = re.findall(r"GLOBAL ([\w.]+)", str(error))
    if types:
        return UnsafeCheckpointError(
            f"{where!r} holds {_listed(types)}, whose loading could run code, so nothing was loaded. If you trust the "
            f"file, allow these types before loading: `torch.serialization.add_safe_globals([...])`. A checkpoint "
            f"saved again with plain values (numbers, strings, tensors, lists, dicts) needs no permission.",
            types,
        )
    reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    return UnsafeCheckpointError(
        f"The safe loading of torch, which is written for pickles of protocol 2 and fills few containers but lists and "
        f"dicts, cannot read {where!r} ({reason}). Nothing was loaded. If you trust the file, load it with "
        f"`torch.load(path, weights_only=False)`, and save it again with plain values."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(set(names)))


# ---- reading a pickle without loading it ----


class _Placeholder:
    """Takes the place of a class or a value that is not loaded, whatever a pickle does to it."""

    def __init__(self, *args: Any) -> None: ...

    __setstate__ = __setitem__ = append = add = __init__

    def __call__(self, *args: Any) -> _Placeholder:
        return self


class _ArrayType(_Placeholder):
    """Takes the place of `numpy.dtype`, and compares what a pickle says about a type with what NumPy says."""

    code: Any

    def __new__(cls, *args: Any) -> _ArrayType:
        made = super().__new__(cls)
        made.code = args[0] if args else None
        if type(made.code) is not str or np.dtype(made.code).hasobject:
            raise made.refusal()
        return made

    def __setstate__(self, state: Any) -> None:
        # After the version there are byte order, parts, sizes and flags, and last the unit of dates, which is harmless.
        if np.dtype(self.code).newbyteorder(state[1]).__reduce__()[2][1:8] != state[1:8]:
            raise self.refusal()

    def refusal(self) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(
            f"holds an array of the NumPy type {self.code!r}, with parts or of objects, whose loading could run code. "
            f"Only arrays of numbers, dates and text are loaded."
        )


def _rebuild_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Call and set what torch calls and sets for a tensor of a subclass, which a file can name instead of it."""
    made = function(*args)
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    return made


class OutlineUnpickler(pickle.Unpickler):
    """Unpickler of plain values. Everything else becomes a placeholder: nothing is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full.startswith(("numpy.dtype", "numpy.ndarray")):  # pickles name `numpy.ndarray`, but never call it
            return _ArrayType
        known = {"collections.OrderedDict": OrderedDict, "torch._tensor._rebuild_from_type_v2": _rebuild_subclass}
        return known.get(full, _Placeholder)

    def persistent_load(self, pid: Any) -> Any:
        return _Placeholder()


# ---- what may be saved ----


def check_loadable(content: Any) -> None:
    """Check that a checkpoint can be loaded again.

    Raises:
        TypeError: A value cannot be loaded again; the message has the paths of the first ten, and the reasons.
    """
    problems = [f"at {where!r}, got {what}" for where, what in islice(unloadable(content), 10)]
    if problems:
        raise TypeError(
            f"A checkpoint must hold values that can be loaded again; {'; '.join(problems)}. Return plain values "
            f"(numbers, strings, tensors, lists, dicts) from `state_dict`, or leave these out with `save_ignore_keys`."
        )


def unloadable(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each value that would be refused when it is loaded again, and the reason.

    The content is pickled, without the data of its tensors, and loaded as a checkpoint.
    """
    if type(content) in (type(None), bool, int, float, str, bytes):
        return
    stream, pickler, kind = io.BytesIO(), SimpleNamespace(__name__="pickle", Pickler=_WithoutData), type(content)
    try:
        torch.save(content, stream, pickle_module=pickler)
        load_plain(stream, path)
        return
    except Exception as error:  # noqa: BLE001 - both run the methods of classes that the user defines or allows
        reason = f" that cannot be loaded again: {error}"
        if types := getattr(error, "types", None):
            reason = (
                f". Loading it could run code, so it is refused unless these types are allowed first: "
                f"`torch.serialization.add_safe_globals([...])` with {_listed(types)}"
            )
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, (dict, list, tuple)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
    inside = [hit for key, value in items for hit in unloadable(value, f"{path}/{key}".lstrip("/"))]
    yield from inside or [(path, f"a `{kind.__module__}.{kind.__qualname__}`{reason}")]


class PlainPickler(pickle.Pickler):
    """Pickler that writes a deque as a call, because the safe loading of torch does not fill one."""

    def reducer_override(self, value: Any) -> Any:
        return (deque, (list(value), value.maxlen)) if type(value) is deque else NotImplemented


class _WithoutData(PlainPickler):
    """Pickler that writes an empty tuple in place of a tensor; other classes of tensors have to be allowed."""

    def reducer_override(self, value: Any) -> Any:
        kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        # Since torch 2.15, nested tensors are not loaded without running code.
        if isinstance(value, torch.Tensor) and not value.is_nested and (type(value) in kinds or is_sharded(value)):
            return torch.Size, ((),)
        return super().reducer_override(value)


# ---- plain pickles ----


def load_pickle(data: bytes, where: str) -> Any:
    """Load a plain pickle, such as one that the reference wrote, running no code from it.

    Args:
        data: The pickle.
        where: The name of the file, for messages.

    Raises:
        UnsafeCheckpointError: It holds types whose loading could run code.
        CorruptCheckpointError: It is damaged.
    """
    try:
        OutlineUnpickler(io.BytesIO(data)).load()
        return _Unpickler(io.BytesIO(data)).load()
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{where!r} {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # damaged pickles fail in many ways
        raise CorruptCheckpointError(where, f"its pickle cannot be read ({error})") from error


class _Unpickler(pickle.Unpickler):
    """Unpickler of an allowlist, without classes written in Python, whose attributes a pickle could set."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        plain = (set, frozenset, complex, bytearray, range, slice)
        self._allowed: dict[str, Any] = {
            **{f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__") for kind in plain},
            **_NUMPY,
            "numpy.ndarray": np.ndarray,
            "numpy.dtype": np.dtype,
            "datetime.timedelta": datetime.timedelta,
            "collections.OrderedDict": OrderedDict,
            "_codecs.encode": codecs.encode,
            "torch.torch_version.TorchVersion": str,
            "torch.storage._load_from_bytes": _load_storage,
            "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        }
        for given in torch.serialization.get_safe_globals():
            value, name = given if isinstance(given, tuple) else (given, f"{given.__module__}.{given.__qualname__}")
            self._allowed[name] = value

    def find_class(self, module: str, name: str) -> Any:
        if (full := f"{module}.{name}") in self._allowed:
            return self._allowed[full]
        raise UnsafeCheckpointError(
            f"holds `{full}`, whose loading could run code, so nothing was loaded. If you trust the file, allow it "
            f"before loading: `torch.serialization.add_safe_globals([...])`."
        )


def _load_storage(content: bytes) -> torch.storage.TypedStorage:
    storage = load_plain(io.BytesIO(content), "the data of a tensor")
    if not isinstance(storage, torch.storage.TypedStorage):  # `OutlineUnpickler` has not seen what else this could be
        raise TypeError("a tensor has no data")
    return storage


def _rebuild_tensor(*arguments: Any) -> Any:
    rebuild: Callable[..., Any] = torch._utils._rebuild_tensor_v2
    return rebuild(*arguments[:4], False, OrderedDict())
