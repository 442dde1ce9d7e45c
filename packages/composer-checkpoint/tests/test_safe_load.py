"""Checkpoints that were made to run code, and what is loaded without permission."""

from __future__ import annotations

import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.metadata import MetadataIndex

from composer.checkpoint import CorruptCheckpointError, UnsafeCheckpointError, read_checkpoint, safe_torch_load
from composer.checkpoint.load import read_resumption
from composer.checkpoint.shards import read_index, read_shards
from composer.testing import deep_compare

# ---- pickles that run code ----


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


class Mine:
    def __setstate__(self, state: Any) -> None:
        Path("ran").touch()

    def __getstate__(self) -> Any:
        return {"a": 1}


def value(plain: Any) -> bytes:
    """A value as its opcodes; bytes are opcodes already."""
    if isinstance(plain, bytes):
        return plain
    if isinstance(plain, tuple):
        return b"(" + b"".join(map(value, plain)) + b"t"
    return pickle.dumps(plain, 2)[2:-1]


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(name: str, *arguments: Any) -> bytes:
    return named(name) + value(arguments) + b"R"


FLAGS = value((3, "|", None, None, None, 8, 1, 63))
"""The state of a NumPy type with the flags of one that holds references."""
TEXT = call("numpy.dtype", "S8", False, True)
REBUILD = "torch._tensor._rebuild_from_type_v2"
OF_BYTES = named("numpy.dtypes.BytesDType")
PICKLES = {
    "a command": pickle.dumps(Command(), 2)[2:-1],
    "a command in containers": pickle.dumps({"a": [({1: Command()},)]}, 2)[2:-1],
    "a class": pickle.dumps([Mine()], 2)[2:-1],
    # NumPy would take bytes of the file for references.
    "flags": TEXT + FLAGS + b"b",
    "flags of a class": named("numpy.dtypes.BytesDType") + value(()) + b"R" + FLAGS + b"b",
    "flags by torch": call(REBUILD, named("numpy.dtype"), OF_BYTES, ("S8", False, True), FLAGS),
    "a field of references": call("numpy.dtype", "V8", False, True)
    + value((3, "|", None, ("a",), b"}" + value("a") + value((TEXT, 0)) + b"s", 8, 1, 0))
    + b"b",
    "references": named("numpy.dtype") + value(("O",)) + b"\x81",
    "an array over bytes": call("numpy.ndarray", (1,), "O", call("_codecs.encode", "AAAAAAAA", "latin1")),
}


def archive(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("a/data.pkl", b"\x80\2" + pickled + b".")
        opened.writestr("a/version", b"3\n")
    return path


@pytest.mark.parametrize("name", ["a.pt", "a.tar", "old.pt", "resumption.pkl", ".metadata"])
@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_would_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if name in ("a.pt", "a.tar"):
        archive(tmp_path / "a.pt", PICKLES[kind])
    else:
        start = [torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True}] if name == "old.pt" else []
        path.write_bytes(b"".join(pickle.dumps(one, 2) for one in start) + b"\x80\2" + PICKLES[kind] + b".")
    if name == "a.tar":
        with tarfile.open(path, "w") as opened:
            opened.add(tmp_path / "a.pt", "composer_states.pt")
    read = {"resumption.pkl": read_resumption, ".metadata": read_index}.get(name, read_checkpoint)

    with pytest.raises(UnsafeCheckpointError, match=rf"(?s){name}.*could run code"):
        read(path)
    assert not Path("ran").exists()


def test_the_data_of_a_tensor_is_nothing_else(tmp_path: Path) -> None:
    """A type that another pickle describes well is not changed afterwards."""
    inner = archive(tmp_path / "inner.pt", TEXT).read_bytes()
    pickled = named("torch.storage._load_from_bytes") + pickle.dumps((inner,), 4)[2:-1] + b"R" + FLAGS + b"b"
    (tmp_path / "resumption.pkl").write_bytes(b"\x80\4" + pickled + b".")

    with pytest.raises(CorruptCheckpointError, match="a tensor has no data"):
        read_resumption(tmp_path / "resumption.pkl")


def test_what_torch_fills_no_objects_of_is_told(tmp_path: Path) -> None:
    torch.save({"a": Items(b=1)}, tmp_path / "a.pt")

    with pytest.raises(UnsafeCheckpointError, match=r"Items.*add_safe_globals"):
        safe_torch_load(tmp_path / "a.pt")
    # A deque, as not every version of torch refuses a subclass of list or dict that is allowed.
    torch.save({"a": deque([1])}, tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"fills few containers but lists and dicts.*deque.*plain values"):
        safe_torch_load(tmp_path / "a.pt")


class Items(dict[str, int]):
    pass


# ---- archives ----


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("a/data.pkl", b"\x80\2N.")
        opened.writestr("a/data/0", bytes(1 << 24))


def _twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as opened:
        for name in ("a/data.pkl", "a/DATA.pkl"):
            opened.writestr(name, b"\x80\2N.")


def _larger_than_it_is(path: Path) -> None:
    data = bytearray(archive(path, b"N").read_bytes())
    first = data.index(b"PK\1\2")
    data[first + 20 : first + 28] = struct.pack("<II", 1 << 31, 1 << 31)
    path.write_bytes(data)


def _of_two_lists(path: Path) -> None:
    data = archive(path, b"N").read_bytes()
    start, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    path.write_bytes(data[:end] + data[start:end] + data[end:])


def _without_content(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("a/version", b"3\n")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_compressed, "is compressed"),
        (_twice, "one name"),
        (_larger_than_it_is, "overlaps"),
        (_of_two_lists, "recorded offset"),
        (_without_content, r"a/data\.pkl"),
    ],
)
def test_an_archive_that_torch_does_not_write_is_damaged(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path / "a.pt")

    with pytest.raises(CorruptCheckpointError, match=reason):
        safe_torch_load(tmp_path / "a.pt")


def test_an_archive_of_folders_is_damaged(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as opened:
        info = tarfile.TarInfo("composer_states.pt")
        info.type = tarfile.DIRTYPE
        opened.addfile(info)

    with pytest.raises(CorruptCheckpointError, match=r"a\.tar"):
        read_checkpoint(tmp_path / "a.tar")


# ---- shards ----


class _OldPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), self.name_of(obj))) if isinstance(obj, Enum) else NotImplemented

    @staticmethod
    def name_of(member: Enum) -> str:
        return member.name


class _HostilePickler(_OldPickler):
    @staticmethod
    def name_of(member: Enum) -> str:
        return "__subclasses__"


def _in_shards(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"w": torch.ones(4)}, checkpoint_id=folder)
    return folder


def test_an_index_of_every_patch_of_python_is_read(tmp_path: Path) -> None:
    path = _in_shards(tmp_path / "ep0-ba1") / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    with path.open("wb") as file:
        _OldPickler(file).dump(metadata)
    assert b"getattr" in path.read_bytes()
    assert read_index(path).state_dict_metadata == metadata.state_dict_metadata

    with path.open("wb") as file:
        _HostilePickler(file).dump(metadata)
    with pytest.raises(UnsafeCheckpointError, match=r"`getattr\(<enum '_MEM_FORMAT_ENCODING'>, '__subclasses__'\)`"):
        read_index(path)


def test_code_in_place_of_a_tensor_of_shards_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = _in_shards(tmp_path / "ep0-ba1") / ".metadata"
    archive(path.parent / "__0_0.distcp", PICKLES["a command"])
    metadata = pickle.loads(path.read_bytes())
    entry = metadata.storage_data[MetadataIndex("w", [0])]
    entry.offset, entry.length = 0, (path.parent / "__0_0.distcp").stat().st_size
    path.write_bytes(pickle.dumps(metadata))

    with pytest.raises(UnsafeCheckpointError, match=r"(?s)ep0-ba1' hold something else .* could run code.*system"):
        read_shards({"w": torch.zeros(4)}, path.parent)
    assert not Path("ran").exists()


# ---- and what is honest ----


def test_honest_content_of_every_kind_loads(tmp_path: Path) -> None:
    weight, shared = torch.nn.Parameter(torch.ones(3)), {"betas": (0.9, 0.99)}
    content = {
        "tied": [weight, weight], "shared": [shared] * 1000, "view": torch.arange(10.0)[3:5], "none": torch.empty(0, 3),
        "expanded": torch.zeros(1, 1, 64).expand(32, 1000, 64), "scalar": torch.tensor(1), "half": torch.ones(2).half(),
        "uint16": torch.ones(3, dtype=torch.uint16), "bits": torch.ones(2).bfloat16(),
        "complex": torch.ones(2, dtype=torch.complex64), "channels_last": torch.ones(1, 2, 3, 3).to(
            memory_format=torch.channels_last), "bytes": b"ab", "bytearray": bytearray(b"ab"),
        "set": {1, 2}, "numbers": [2**100, -1, 1j], "keys": {(0, 1): 2, 2**62: 3},
        "state": torch.nn.Linear(2, 2).state_dict(), "counts": Counter("aab"), "ordered": OrderedDict(a=1),
        "array": np.arange(3), "text": np.array(["ab"]), "number": np.float64(1),
        "date": np.datetime64("2020-01-01"), "mask": np.ones(2, bool), "generator": torch.get_rng_state(),
        "numpy": np.random.default_rng(0).bit_generator.state, "size": torch.Size([1, 2]),
    }  # fmt: skip
    for zipped in (True, False):
        if not zipped:  # torch itself cannot load it from the old format
            del content["uint16"]
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        loaded = safe_torch_load(tmp_path / "a.pt")
        assert loaded["tied"][0] is loaded["tied"][1]
        deep_compare(loaded, content)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Validating sparse tensor invariants")
def test_sparse_tensors_load(tmp_path: Path) -> None:
    torch.save({"sparse": torch.eye(3).to_sparse(), "rows": torch.eye(3).to_sparse_csr()}, tmp_path / "a.pt")

    loaded = safe_torch_load(tmp_path / "a.pt")

    assert loaded["sparse"].to_dense().tolist() == loaded["rows"].to_dense().tolist() == torch.eye(3).tolist()


def test_what_the_user_has_allowed_stays_allowed(tmp_path: Path) -> None:
    torch.save({"step": 1}, tmp_path / "file.pt")
    before = torch.serialization.get_safe_globals()
    try:
        torch.serialization.add_safe_globals([deque])
        safe_torch_load(tmp_path / "file.pt")

        assert deque in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
