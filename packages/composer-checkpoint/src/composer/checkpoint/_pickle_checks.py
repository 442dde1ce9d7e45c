"""Checks of a pickle before it is loaded.

`torch.load(weights_only=True)` runs no foreign code, but it does not bound time and memory: a hundred bytes can
describe a key that takes years to hash, or a tensor that reaches beyond its data. So a pickle is read twice before it
is loaded. The first pass follows its opcodes and creates no objects. It bounds depth and sharing, so that walking,
hashing or comparing the content takes time in proportion to the file. The second creates plain values, with a
`_Placeholder` for every class, and checks the arguments of each call, because only they tell how large a tensor is and
where its data is. Both use documented parts of the format only, and no private tables of torch.
"""

from __future__ import annotations

import _compat_pickle
import io
import mmap
import pickle
import pickletools
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch

from composer.checkpoint.checksum import CorruptCheckpointError, Part, parts_of_archive

__all__ = ["UnsafeCheckpointError", "check_pickle", "check_torch_file", "check_view", "read_plain_values", "refuse"]

_DEPTH = 100  # nested containers: a run has ten, and `copy.deepcopy` takes four calls for each
_SHARED = 1_000_000, 4  # values repeated by reference: this many, plus this many for each byte of the pickle
_SAME_HASH = 1_000  # integer keys of one hash, as those of more than 60 bits can be chosen to be
_LONG_KEYS = 10_000  # keys that hold such integers in tuples
_OUTLINE = 1 << 28  # bytes that are read to find the plain values of a pickle
_REPEATED = 1 << 30, 16  # bytes of a tensor that repeats its data (stride 0): this many, or this many times the data


class UnsafeCheckpointError(pickle.UnpicklingError):
    """Loading a checkpoint could run code, or take time or memory out of proportion. Nothing was loaded.

    Attributes:
        reason: The part of the message that says what the checkpoint holds.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class _Refused(Exception):
    """A pickle does what no checkpoint does; the message says what."""


def refuse(where: str, what: str) -> UnsafeCheckpointError:
    """Return the error for a file that holds `what`."""
    return UnsafeCheckpointError(
        f"{where!r} holds {what}. No valid checkpoint contains that, and loading it could exhaust the memory or never "
        f"end, so nothing was loaded.",
        reason=f"it holds {what}",
    )


def check_torch_file(file: IO[bytes], where: str, parts: Mapping[str, Part] | None = None) -> None:
    """Check what `torch.save` wrote, before `torch.load` reads it.

    Args:
        file: The bytes; afterwards at any position.
        where: The name of the file, for the message.
        parts: The parts of the archive, if they are known already.

    Raises:
        UnsafeCheckpointError: Loading them could take time or memory out of proportion.
        CorruptCheckpointError: They are damaged.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(2) != b"PK":
        _check_legacy(file, where, size)
        return
    parts = parts_of_archive(file, where) if parts is None else parts
    prefix = next(iter(parts)).partition("/")[0] if parts else ""
    try:
        start, count, _ = parts[f"{prefix}/data.pkl"]
    except KeyError:
        raise CorruptCheckpointError(where, "it lacks the part 'data.pkl'") from None
    file.seek(start)
    sizes = {name.removeprefix(f"{prefix}/data/"): part.size for name, part in parts.items()}
    check_pickle(file.read(count), where, size, sizes)


def check_pickle(data: bytes, where: str, size: int | None = None, parts: Mapping[str, int] | None = None) -> None:
    """Check a pickle; raises like `check_torch_file`.

    Args:
        data: The pickle.
        where: The name of the file, for the message.
        size: The size of the file with the tensors' bytes; None: the pickle may not refer to tensors outside of it.
        parts: The sizes of the file's parts, each with the bytes of one tensor, by their keys.
    """
    with _reported(where):
        _scan(data, 0)
        _DryRun(io.BytesIO(data), size, parts).load()


def _check_legacy(file: IO[bytes], where: str, size: int) -> None:
    """Check the format of torch before 1.6: five pickles, the fourth is the content, and tensors."""
    with _reported(where):
        file.seek(0)
        mapped = isinstance(file, io.BufferedReader)
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else file.read()
        end = 0
        for number in range(5):
            start, end = end, _scan(data, end)
            made = _DryRun(io.BytesIO(data[start:end]), size).load()
            if number == 0 and made != torch.serialization.MAGIC_NUMBER:
                return  # `torch.load` reads nothing else


@contextmanager
def _reported(where: str) -> Iterator[None]:
    try:
        yield
    except _Refused as error:
        raise refuse(where, str(error)) from None
    except Exception as error:  # damaged and hostile pickles fail in many ways
        reason = str(error) or type(error).__name__
        raise CorruptCheckpointError(where, f"its pickle cannot be read ({reason})") from error


# ---- the first pass: opcodes ----

_Node = list[Any]
"""An object of a pickle: [number of values without sharing, depth, whether it is frozen, long integers in it].

The last is the hash of a long integer, True for a container that holds one, or None. Dicts and sets with such keys
also count them by their hashes."""

_ATOM: _Node = [1, 0, True, None]
_PUSH, _PUT, _GET, _MARK, _MAKE, _CHANGE, _POP, _DUP, _MEMOIZE, _STOP, _NOTHING = range(11)
_KINDS = {"MARK": _MARK, "POP": _POP, "POP_MARK": _POP, "DUP": _DUP, "MEMOIZE": _MEMOIZE, "STOP": _STOP,
          "PROTO": _NOTHING, "FRAME": _NOTHING, "STACK_GLOBAL": _PUSH}  # fmt: skip
_CHANGES = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
# Keys are every second item of a dict, and all items of a set.
_KEYS = {ord("s"): 2, ord("u"): 2, ord("d"): 2, 0x90: 1, 0x91: 1}
_LONGS = {ord("I"), ord("L"), 0x8A, 0x8B}
_TWO_LINES = {ord("c"), ord("i")}


def _table() -> list[tuple[int, int, int]]:
    """List for each opcode its kind, the length of its argument, and how many objects it takes (-1: down to a mark)."""
    table = [(-1, 0, 0)] * 256
    for op in pickletools.opcodes:
        takes = -1 if pickletools.stackslice in op.stack_before else len(op.stack_before)
        if op.name in _CHANGES:
            kind, takes = _CHANGE, max(takes - 1, -1)
        elif op.name.endswith(("GET", "PUT")):
            kind = _GET if op.name.endswith("GET") else _PUT
        else:
            made = op.stack_before or op.name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
            kind = _KINDS.get(op.name, _MAKE if made else _PUSH)
        table[ord(op.code)] = kind, 0 if op.arg is None else op.arg.n, takes
    return table


_TABLE = _table()
_LENGTHS = {-2: 1, -3: 4, -4: 4, -5: 8}  # of the length of an argument, by what `pickletools` says of it


def _scan(data: Any, at: int) -> int:
    """Follow the opcodes of a pickle that begins at `at`; return where it ends.

    A container is complete when it is referred to again, as it must not be changed after that. So the number of values
    that references repeat is known, and bounds all work on the content.
    """
    stack: list[_Node] = []
    marks: list[int] = []
    memo: dict[int, _Node] = {}
    shared, most_shared, long_keys = 0, _SHARED[0] + _SHARED[1] * len(data), 0
    while True:
        code = data[at]
        kind, length, takes = _TABLE[code]
        at += 1
        argument, node = at, _ATOM
        if length > 0:
            at += length
        elif length == -1:
            for _ in range(2 if code in _TWO_LINES else 1):
                at = data.find(b"\n", at) + 1
                if at == 0:
                    raise IndexError("it is cut off")
        elif length < 0:
            at += _LENGTHS[length]
            count = int.from_bytes(data[argument:at], "little")
            at += count
            if count > 1024:
                node = [1 + count // 64, 0, True, None]
        if kind == _PUSH:
            if takes:
                del stack[-takes:]
            is_long = code in _LONGS and at - argument > 8
            stack.append([1, 0, True, _hash_of_long(code, data[argument:at])] if is_long else node)
        elif kind == _PUT:
            index = int.from_bytes(data[argument:at], "little") if length > 0 else int(data[argument : at - 1])
            if index > at:  # indices are consecutive, and unpicklers keep a list
                raise _Refused(f"the memo index {index}")
            memo[index] = stack[-1]
        elif kind == _GET:
            node = memo[int.from_bytes(data[argument:at], "little") if length > 0 else int(data[argument : at - 1])]
            shared += node[0]
            if shared > most_shared:
                raise _Refused(f"references that repeat more than {most_shared} values")
            if not node[2]:
                node[2] = True
            stack.append(node)
        elif kind == _MARK:
            marks.append(len(stack))
        elif kind in (_MAKE, _CHANGE):
            first = marks.pop() if takes < 0 else len(stack) - takes
            items = stack[first:]
            del stack[first:]
            if kind == _CHANGE:
                node = stack[-1]
                if node[2]:
                    raise _Refused("an object that is changed after it was referred to, such as one that holds itself")
            else:
                node = [1, 1, False, None]
                stack.append(node)
            size, depth = node[0], node[1]
            for item in items:
                size += item[0]
                if item[1] >= depth:
                    depth = item[1] + 1
                if item[3] is not None:
                    node[3] = True
            node[0], node[1] = size, depth
            if depth > _DEPTH:
                raise _Refused(f"more than {_DEPTH} containers in each other")
            if node[3] and code in _KEYS:
                keys = [item[3] for item in items[:: _KEYS[code]] if item[3] is not None]
                long_keys += keys.count(True)
                if len(node) == 4:
                    node.append(Counter())
                node[4].update(key for key in keys if key is not True)
                if long_keys > _LONG_KEYS or any(node[4][key] > _SAME_HASH for key in keys):
                    raise _Refused("keys that are chosen to have one hash")
        elif kind == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif kind == _POP:
            first = marks.pop() if takes < 0 or (marks and marks[-1] == len(stack)) else len(stack) - 1
            del stack[first:]
        elif kind == _DUP:
            raise _Refused("the opcode DUP")  # no pickler writes it
        elif kind == _STOP:
            return at
        elif kind < 0:
            raise ValueError(f"unknown opcode {code}")


def _hash_of_long(code: int, argument: bytes) -> int:
    if code in (0x8A, 0x8B):
        return hash(pickle.decode_long(bytes(argument[1 if code == 0x8A else 4 :])))
    return hash(int(bytes(argument).strip().removesuffix(b"L")))


# ---- the second pass: calls ----


class _Placeholder:
    """Takes the place of a class or a value that is not loaded, whatever a pickle does to it."""

    name = ""
    args: tuple[Any, ...] = ()
    data: tuple[int, int] | None = None  # the bytes of a storage, and of each of its values

    def __new__(cls, *args: Any, **kwargs: Any) -> _Placeholder:
        made = super().__new__(cls)
        made.args = args
        if cls.name:
            _check_call(cls.name, args)
        if cls.name in _STORAGES:
            made.data = 0, 1
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any) -> _Placeholder:
        return self

    def __setstate__(self, state: Any) -> None:
        if self.name == "numpy.dtype":
            _check_dtype(state)
        elif self.name and isinstance(state, tuple) and len(state) == 4:
            _check_tensor(*state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...


class _Outline(pickle.Unpickler):
    """Unpickler of plain values. Everything else becomes a placeholder: nothing is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Placeholder

    def persistent_load(self, pid: Any) -> Any:
        return _Placeholder()


def read_plain_values(stream: IO[bytes]) -> Any:
    """Read the plain values of a pickle at the beginning of a stream, reading no more of the stream than needed.

    Raises:
        Exception: It is damaged, or asks for more time or memory than a checkpoint needs.
    """
    data = b""
    while True:
        data += (more := stream.read(max(1 << 16, len(data))))
        try:
            _scan(data, 0)
        except (IndexError, _Refused):  # perhaps because the end was not read yet
            if not more or len(data) > _OUTLINE:
                raise
        else:
            return _Outline(io.BytesIO(data)).load()


class _DryRun(_Outline):
    """Unpickler that checks each call, and each tensor's place in the file."""

    def __init__(self, file: IO[bytes], size: int | None, parts: Mapping[str, int] | None = None) -> None:
        super().__init__(file, encoding="utf-8")  # as torch reads strings of Python 2
        self._size, self._parts = size, parts
        self._classes: dict[str, type[_Placeholder]] = {}
        self._storages: dict[Any, _Placeholder] = {}
        self._declared = 0

    def find_class(self, module: str, name: str) -> Any:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        full = f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"
        if not _is_checked(full):
            return _Placeholder
        if full not in self._classes:
            self._classes[full] = type("Left", (_Placeholder,), {"name": full})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._size is None:
            raise ValueError("it refers to tensors that are not in it")
        _, kind, key, _, count, *view = pid
        itemsize = _ITEMSIZES[kind.name]
        nbytes = _count(count) * itemsize
        if self._parts is not None and nbytes > self._parts.get(key, -1):
            raise _Refused(f"a tensor of {nbytes} bytes in a part of {self._parts.get(key, 0)}")
        if key not in self._storages or self._storages[key].data == (0, itemsize):
            self._declared += nbytes
            if self._declared > self._size:
                raise _Refused(f"tensors of more than the file's {self._size} bytes")
            self._storages[key] = storage = _Placeholder()
            storage.data = nbytes, itemsize
        storage = self._storages[key]
        if view and view[0] is not None:
            storage = _Placeholder()
            storage.data = _count(view[0][2]) * itemsize, itemsize
        return storage


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _Refused(f"a size that is not a count ({value!r:.40})")
    return value


def _check_call(name: str, args: tuple[Any, ...]) -> None:
    function = name.rpartition(".")[2]
    if name in _TENSORS:
        _check_tensor(*args[:4], *args[6:7])
    elif name in _COLLECTIONS:
        _check_collection(name, args)
    elif args and (name in _STORAGES or _CONSTRUCTORS.fullmatch(name)):
        raise _Refused(f"a call of `{name}`, which takes memory without content")
    elif function == "_rebuild_from_type_v2":
        args[0](*args[2])
    elif function == "_rebuild_nested_tensor":
        raise _Refused("a nested tensor, whose bounds torch does not check")
    elif name == "_codecs.encode" and args[1:] not in {(), ("latin1",), ("latin-1",), ("ascii",), ("utf-8",)}:
        raise _Refused(f"text in the encoding {args[1]!r:.40}")
    elif name == "numpy.dtype" and not _DTYPE.fullmatch(_text(args[0])):
        raise _Refused(f"the NumPy type {args[0]!r:.40}")
    elif name in _NUMPY and function == "_reconstruct" and args[1:2] != ((0,),):
        raise _Refused("an array without content")
    elif name in _NUMPY and function == "scalar" and len(args) < 2:
        raise _Refused("a NumPy number without content")


def _check_collection(name: str, args: tuple[Any, ...]) -> None:
    if not args:
        return
    if isinstance(args[0], _Placeholder) and args[0].name == "_codecs.encode":  # how bytes are written
        return
    if not isinstance(args[0], (list, tuple, dict, set, str, bytes)):  # a number is a size, a range is endless
        raise _Refused(f"a call of `{name}` with an argument that is not a list")
    keys = (item[0] if isinstance(item, (list, tuple)) and item else item for item in args[0])
    hashes = Counter(hash(key) for key in keys if isinstance(key, int) and key.bit_length() > 60)
    if hashes and hashes.most_common(1)[0][1] > _SAME_HASH:
        raise _Refused("keys that are chosen to have one hash")


def _check_tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any = None) -> None:
    if not isinstance(storage, _Placeholder) or _MAKERS.fullmatch(storage.name):
        raise _Refused("a tensor without data")
    if storage.data is None:
        return  # its bytes are in the pickle
    nbytes, itemsize = storage.data
    if isinstance(dtype, type) and issubclass(dtype, _Placeholder) and dtype.name in _DTYPES:
        itemsize = _DTYPES[dtype.name]
    _check_view(nbytes, itemsize, offset, size, stride)


def check_view(nbytes: int, itemsize: int, offset: Any, size: Any, stride: Any, where: str) -> None:
    """Check that a tensor is within its `nbytes` bytes of data, and not far larger than they are by repeating them.

    Raises:
        UnsafeCheckpointError: It is not.
    """
    with _reported(where):
        _check_view(nbytes, itemsize, offset, size, stride)


def _check_view(nbytes: int, itemsize: int, offset: Any, size: Any, stride: Any) -> None:
    size, stride = (value.args[0] if isinstance(value, _Placeholder) else value for value in (size, stride))
    end, values = _count(offset) + 1, 1
    for length, step in zip(size, stride, strict=True):
        end += (_count(length) - 1) * _count(step)
        values *= length
    if values and end * itemsize > nbytes:
        raise _Refused(f"a tensor of shape {tuple(size)} that reaches beyond its {nbytes} bytes")
    if values * itemsize > max(_REPEATED[0], _REPEATED[1] * nbytes):
        raise _Refused(f"a tensor of shape {tuple(size)} over {nbytes} bytes")


def _check_dtype(state: Any) -> None:
    """Refuse flags and fields with which NumPy takes bytes for references to objects, or reads beyond an array."""
    subtype, fields, itemsize, flags = state[2], state[4], state[5], (*state, 0)[7]
    if subtype is not None or fields is not None or itemsize < -1 or flags & ~8:  # 8: of strings
        raise _Refused("a NumPy type with parts")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value if isinstance(value, str) else ""


_DTYPE = re.compile(r"[<>=|]?[?a-zA-NP-Z]\d{0,9}")  # all but objects
_TENSORS = {f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor")}
_MAKERS = re.compile(
    r"torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type_v2|torch\.nn\.parameter\.Parameter"
)
_COLLECTIONS = {"builtins.bytes", "builtins.bytearray", "builtins.set", "builtins.frozenset", "collections.Counter",
                "collections.OrderedDict"}  # fmt: skip
# The bytes of a value of each storage class that a pickle may name. New dtypes use `UntypedStorage`, so none is added.
_KIND_SIZES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexDouble": 16, "ComplexFloat": 8, "QInt8": 1, "QInt32": 4, "QUInt8": 1, "QUInt4x2": 1, "QUInt2x4": 1,
}  # fmt: skip
_ITEMSIZES = {
    "torch.storage.UntypedStorage": 1,
    **{f"torch.{on}{kind}Storage": size for kind, size in _KIND_SIZES.items() for on in ("", "cuda.")},
}
_STORAGES = {*_ITEMSIZES, "torch.storage.TypedStorage"}
_CONSTRUCTORS = re.compile(r"torch\.(cuda\.)?(sparse\.)?\w*Tensor|numpy\.ndarray")
_DTYPES = {str(value): value.itemsize for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NUMPY = {
    f"{module}.{name}" for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    for name in ("_reconstruct", "scalar")
} | {"numpy.dtype"}  # fmt: skip
_CHECKED = _COLLECTIONS | _STORAGES | _NUMPY | {*_DTYPES, "_codecs.encode"}


def _is_checked(name: str) -> bool:
    return name in _CHECKED or bool(_MAKERS.fullmatch(name) or _CONSTRUCTORS.fullmatch(name))
