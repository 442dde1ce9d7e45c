"""Checkpoints that were made to do harm: each is refused at once, and takes hardly any memory."""

from __future__ import annotations

import io
import os
import pickle
import resource
import struct
import tarfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.metadata import MetadataIndex

from composer.checkpoint import UnsafeCheckpointError, read_checkpoint, safe_torch_load
from composer.checkpoint.checksum import sha256_of
from composer.checkpoint.file import write_file
from composer.checkpoint.load import read_resumption
from composer.checkpoint.shards import STATES, fill_shards, identify_run, read_index, read_run, read_shards
from composer.testing import deep_compare

REFUSED, DAMAGED = "UnsafeCheckpointError", "CorruptCheckpointError"


# ---- a process that can be spared ----


def _limit() -> None:
    """A process may take 2 GiB more than it has, and 60 seconds of the processor."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), used + (2 << 30)))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


@pytest.fixture(scope="module")
def spare() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn"), _limit) as pool:
        yield pool


def _outcome(read: Callable[[str], Any], path: str) -> tuple[str, str]:
    try:
        read(path)
    except Exception as error:  # noqa: BLE001 - which one is asked
        return type(error).__name__, str(error)
    return "", ""


def refused(spare: ProcessPoolExecutor, read: Callable[[str], Any], path: Path, kind: str, reason: str) -> None:
    found, message = spare.submit(_outcome, read, str(path)).result(timeout=300)

    assert (found, reason in message, str(path) in message) == (kind, True, True), f"{found}: {message}"


# ---- pickles ----


def op(code: bytes, *arguments: Any) -> bytes:
    """A call: the function, the arguments in a tuple, REDUCE."""
    return code + b"(" + b"".join(map(value, arguments)) + b"tR"


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


def stored(count: int, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return value(("storage", named(f"torch.{kind}"), key, "cpu", count)) + b"Q"


def tensor(count: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    hooks = named("collections.OrderedDict") + b")R"
    return op(named("torch._utils._rebuild_tensor_v2"), stored(count), offset, size, stride, False, hooks)


def doubled(times: int = 60) -> bytes:
    """A tuple that holds another one twice, which holds another one twice ..."""
    made = b"K\1\x85q\0"
    for index in range(times):
        made = (b"(" + made + b"h" + bytes([index])) + b"tq" + bytes([index + 1])
    return made


TUPLES = doubled()
DEEP_TUPLE = b"K\1" + b"\x85" * 200_000
PICKLES = {
    "a key of doubled tuples": (b"}" + TUPLES + b"K\1s", REFUSED, "repeat"),
    "doubled tuples": (b"}K\1" + TUPLES + b"s", REFUSED, "repeat"),
    "a list that is filled later": (b"]q\0h\0\x86q\1h\0h\1a", REFUSED, "changed after"),
    "a list that holds itself": (b"]q\0h\0a", REFUSED, "changed after"),
    "a deep key": (b"}" + DEEP_TUPLE + b"K\1s", REFUSED, "in each other"),
    "a deep list": (b"]" * 200_000 + b"a" * 199_999, REFUSED, "in each other"),
    "keys of one hash": (
        b"}(" + b"".join(value(k * (2**61 - 1)) + b"N" for k in range(20_000, 40_000)) + b"u", REFUSED, "one hash"
    ),
    "a far memo index": (b"]r\xff\xff\xff\x7f", REFUSED, "memo index"),
    "a long text": (b"X\xff\xff\xff\xff", DAMAGED, "cannot be read"),
    "a text of terabytes": (b"\x8d" + struct.pack("<Q", 1 << 50), DAMAGED, "cannot be read"),
    "bytes of terabytes": (b"\x96" + struct.pack("<Q", 1 << 42), DAMAGED, "cannot be read"),
    "a negative length": (b"T\xff\xff\xff\xff", DAMAGED, "cannot be read"),
    "a number of many digits": (b"L" + b"9" * 1_000_000 + b"L\n", DAMAGED, "cannot be read"),
    "a class that is changed": (named("collections.OrderedDict") + b"}b", REFUSED, "changed after"),
    "many bytes": (op(named("builtins.bytearray"), 1 << 42), REFUSED, "not a list"),
    "slow text": (op(named("_codecs.encode"), "\u4e00" * 10, "punycode"), REFUSED, "encoding"),
    "an array without content": (
        op(named("numpy.core.multiarray._reconstruct"), named("numpy.ndarray"), (1 << 42,), "b"), REFUSED, "array"
    ),
    "an array": (op(named("numpy.ndarray"), (1 << 42,)), REFUSED, "takes memory"),
    "an array of objects": (op(named("numpy.dtype"), "O8", False, True), REFUSED, "NumPy type"),
    "a type of flags": (
        op(named("numpy.dtype"), "S8", False, True) + value((3, "|", None, None, None, 8, 1, 63)) + b"b",
        REFUSED, "NumPy type",
    ),
}  # fmt: skip
TENSORS = {
    "more than its part": (tensor(1 << 40, 0, (2,), (1,)), REFUSED, "in a part of"),
    "beyond its data": (tensor(2, 0, (1 << 20,), (1,)), REFUSED, "reaches beyond"),
    "an offset beyond its data": (tensor(2, 1 << 40, (1,), (1,)), REFUSED, "reaches beyond"),
    "a stride beyond its data": (tensor(2, 0, (2,), (1 << 40,)), REFUSED, "reaches beyond"),
    "a negative offset": (tensor(2, -1, (1,), (1,)), REFUSED, "not a count"),
    "a negative size": (tensor(2, 0, (-1, -1), (1, 1)), REFUSED, "not a count"),
    "a negative count": (tensor(-1, 0, (1,), (1,)), REFUSED, "not a count"),
    "one value a billion times": (tensor(2, 0, (1 << 40,), (0,)), REFUSED, "over 8 bytes"),
    "a storage of terabytes": (op(named("torch.storage.UntypedStorage"), 1 << 42), REFUSED, "takes memory"),
    "a tensor of terabytes": (op(named("torch.FloatTensor"), 1 << 40), REFUSED, "takes memory"),
    "a call inside of a call": (
        op(named("torch._tensor._rebuild_from_type_v2"), named("builtins.bytearray"), named("torch.Tensor"),
           (1 << 42,), None), REFUSED, "not a list",
    ),
    "a tensor set later": (
        named("torch.Tensor") + b")\x81" + value((stored(2), 0, (1 << 40,), (1,))) + b"b", REFUSED, "reaches beyond"
    ),
    "a quantized one": (
        op(named("torch._utils._rebuild_qtensor"), stored(2, kind="QInt8Storage"), 0, (1 << 40,), (1,),
           (named("torch.per_tensor_affine"), 1.0, 0), False, named("collections.OrderedDict") + b")R"),
        REFUSED, "reaches beyond",
    ),
    "a nested one": (
        op(named("torch._utils._rebuild_nested_tensor"), *[tensor(2, 0, (1,), (1,))] * 4), REFUSED, "nested"
    ),
    "a sparse one of wrong indices": (
        op(named("torch._utils._rebuild_sparse_tensor"), op(named("torch.serialization._get_layout"),
           "torch.sparse_coo"), (op(named("torch._utils._rebuild_tensor_v2"), stored(1, "1", "LongStorage"), 0, (1, 1),
           (1, 1), False, named("collections.OrderedDict") + b")R"), tensor(2, 0, (1,), (1,)), (2,), False)),
        DAMAGED, "torch cannot read it",
    ),
}  # fmt: skip


def archive(path: Path, pickled: bytes, **parts: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("a/data.pkl", b"\x80\2" + pickled + b".")
        for key, data in {"0": bytes(8), "1": struct.pack("<q", 1 << 40), **parts}.items():
            opened.writestr(f"a/data/{key}", data)
        opened.writestr("a/version", b"3\n")
    return path


@pytest.mark.parametrize("attack", [*PICKLES, *TENSORS])
def test_a_hostile_checkpoint_is_refused(spare: ProcessPoolExecutor, tmp_path: Path, attack: str) -> None:
    pickled, kind, reason = (PICKLES | TENSORS)[attack]

    refused(spare, safe_torch_load, archive(tmp_path / "a.pt", pickled), kind, reason)


@pytest.mark.parametrize("attack", PICKLES)
def test_a_hostile_pickle_is_refused_wherever_it_is(spare: ProcessPoolExecutor, tmp_path: Path, attack: str) -> None:
    pickled, kind, reason = PICKLES[attack]
    for name, read in (
        ("resumption.pkl", read_resumption),
        (".metadata", read_shards_of),
        ("legacy.pt", safe_torch_load),
    ):
        start = b"" if name != "legacy.pt" else b"".join(
            pickle.dumps(one, 2) for one in (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True})
        )  # fmt: skip
        (tmp_path / name).write_bytes(start + b"\x80\2" + pickled + b".")
        refused(spare, read, tmp_path / name, kind, reason)


def read_shards_of(index: str) -> None:
    read_shards({}, Path(index).parent)


def read_start(path: str) -> None:
    assert identify_run(Path(path)) is None


def test_looking_for_a_checkpoint_is_not_held_up(spare: ProcessPoolExecutor, tmp_path: Path) -> None:
    for attack, (pickled, _, _) in PICKLES.items():
        path = archive(tmp_path / "a.pt", pickled)
        assert spare.submit(_outcome, read_start, str(path)).result(timeout=300) == ("", ""), attack


def test_what_torch_allocates_for_an_old_file_is_in_it(spare: ProcessPoolExecutor, tmp_path: Path) -> None:
    pickles = [torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True}]
    storage = value(("storage", named("torch.FloatStorage"), "0", "cpu", 1 << 40, None)) + b"Q"
    (tmp_path / "a.pt").write_bytes(
        b"".join(pickle.dumps(one, 2) for one in pickles) + b"\x80\2" + storage + b"." + pickle.dumps([], 2)
    )

    refused(spare, safe_torch_load, tmp_path / "a.pt", REFUSED, "more than the file's")


# ---- archives ----


def _compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("a/data.pkl", b"\x80\2N.")
        opened.writestr("a/data/0", bytes(1 << 24))


def _twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as opened:
        for name in ("a/data.pkl", "a/DATA.pkl"):
            opened.writestr(name, b"\x80\2N.")


def _overlapping(path: Path) -> None:
    archive(path, b"N")
    data = bytearray(path.read_bytes())
    second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)
    data[second + 42 : second + 46] = bytes(4)  # its content is that of the first
    path.write_bytes(data)


def _larger_than_it_is(path: Path) -> None:
    archive(path, b"N")
    data = bytearray(path.read_bytes())
    first = data.index(b"PK\1\2")
    data[first + 20 : first + 28] = struct.pack("<II", 1 << 31, 1 << 31)
    path.write_bytes(data)


def _of_two_lists(path: Path) -> None:
    archive(path, b"N")
    data = path.read_bytes()
    start = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    path.write_bytes(data[:end] + data[start:end] + data[end:])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_compressed, "is compressed"),
        (_twice, "one name"),
        (_overlapping, "overlaps"),
        (_larger_than_it_is, "overlaps"),
        (_of_two_lists, "overlaps"),
    ],
)
def test_an_archive_that_torch_does_not_write_is_damaged(
    spare: ProcessPoolExecutor, tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path / "a.pt")

    refused(spare, safe_torch_load, tmp_path / "a.pt", DAMAGED, reason)


def test_an_archive_is_unpacked_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.checkpoint.file._UNPACKED", (1 << 20, 20))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as opened:
        info = tarfile.TarInfo("composer_states.pt")
        info.size = 1 << 24
        opened.addfile(info, io.BytesIO(bytes(1 << 24)))

    with pytest.raises(UnsafeCheckpointError, match=r"a\.tar\.gz' holds more than \d+ bytes in a file of"):
        read_checkpoint(tmp_path / "a.tar.gz")


@pytest.mark.parametrize(
    ("kind", "target"),
    [(tarfile.SYMTYPE, "/etc/passwd"), (tarfile.SYMTYPE, "composer_states.pt"), (tarfile.LNKTYPE, "../../x"),
     (tarfile.CHRTYPE, ""), (tarfile.FIFOTYPE, ""), (tarfile.DIRTYPE, "")],
)  # fmt: skip
def test_an_archive_of_links_and_devices_is_damaged(
    spare: ProcessPoolExecutor, tmp_path: Path, kind: bytes, target: str
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as opened:
        info = tarfile.TarInfo("composer_states.pt")
        info.type, info.linkname = kind, target
        opened.addfile(info)

    refused(spare, read_checkpoint, tmp_path / "a.tar", DAMAGED, "a.tar")


def test_the_file_is_named_that_holds_the_hostile_one(spare: ProcessPoolExecutor, tmp_path: Path) -> None:
    archive(tmp_path / "composer_states.pt", PICKLES["doubled tuples"][0])
    with tarfile.open(tmp_path / "a.tar", "w") as opened:
        opened.add(tmp_path / "composer_states.pt", "composer_states.pt")

    refused(spare, read_checkpoint, tmp_path / "a.tar", REFUSED, "a.tar")


def test_a_seal_of_nested_lists_is_none(spare: ProcessPoolExecutor, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as opened:
        opened.writestr("a/data.pkl", b"\x80\2N.")
        opened.comment = b"composer-checkpoint-1 " + b"[" * 3000 + b" " + b"0" * 64

    refused(spare, safe_torch_load, tmp_path / "a.pt", DAMAGED, "cut off or altered")


# ---- shards ----


def _larger(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks[0].sizes = metadata.state_dict_metadata["w"].size = torch.Size([1 << 40])


def _beyond(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0])].offset = 1 << 40


def _before(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0])].offset = -8


def _negative(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0])].length = -1


def _elsewhere(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0])].relative_path = "../../x.distcp"


def _above(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0])].relative_path = ".."


def _missing(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0])].relative_path = "__7_0.distcp"


def _outside(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([1])


def _partly(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([5])


def _twice_in(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks *= 2


def _transformed(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex("w", [0])].transform_descriptors = ["stream.zstd"]


def _without_place(metadata: Any) -> None:
    metadata.storage_data.clear()


def read_four(index: str) -> None:
    read_shards({"w": torch.zeros(4)}, Path(index).parent)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (_larger, DAMAGED, "larger than its"),
        (_beyond, DAMAGED, "not within '__0_0.distcp'"),
        (_before, DAMAGED, "not within '__0_0.distcp'"),
        (_negative, DAMAGED, "not within '__0_0.distcp'"),
        (_elsewhere, DAMAGED, "outside of the folder"),
        (_above, DAMAGED, "outside of the folder"),
        (_missing, DAMAGED, "is missing"),
        (_outside, DAMAGED, "not within its shape"),
        (_partly, DAMAGED, "not the whole of it"),
        (_twice_in, DAMAGED, "not the whole of it"),
        (_transformed, REFUSED, "transformed"),
        (_without_place, DAMAGED, "cannot be read"),
    ],
)
def test_an_index_that_is_not_of_its_folder_is_refused(
    spare: ProcessPoolExecutor, tmp_path: Path, change: Callable[[Any], None], kind: str, reason: str
) -> None:
    path = _in_shards(tmp_path / "ep0-ba1") / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))

    refused(spare, read_four, path, kind, reason)


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


def _in_shards(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"w": torch.ones(4)}, checkpoint_id=folder)
    return folder


def test_an_entry_of_shards_is_checked_as_a_file_is(spare: ProcessPoolExecutor, tmp_path: Path) -> None:
    path = _in_shards(tmp_path / "ep0-ba1") / ".metadata"
    archive(path.parent / "__0_0.distcp", tensor(1 << 40, 0, (4,), (1,)))
    metadata = pickle.loads(path.read_bytes())
    entry = metadata.storage_data[MetadataIndex("w", [0])]
    entry.offset, entry.length = 0, (path.parent / "__0_0.distcp").stat().st_size
    path.write_bytes(pickle.dumps(metadata))

    refused(spare, read_four, path.parent / "__0_0.distcp", REFUSED, "in a part of")


def read_whole_run(folder: str) -> None:
    fill_shards(read_run(Path(folder))[0], {})


def test_shards_take_memory_for_what_they_have_only(spare: ProcessPoolExecutor, tmp_path: Path) -> None:
    folder = _in_shards(tmp_path / "ep0-ba1")
    shard = {"__shard__": "w", "shape": (1 << 40,), "dtype": torch.float32}
    digests = {name: sha256_of(folder / name) for name in os.listdir(folder)}
    write_file({"content": {"w": shard}, "folder": "ep0-ba1", "sha256": digests}, folder / STATES)

    refused(spare, read_whole_run, folder, DAMAGED, "has the shape (4,) in its index")


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
        "state": torch.nn.Linear(2, 2).state_dict(),
        "seen": {pow(3, i, 2**63 - 25) for i in range(20_000)}, "counts": Counter("aab"),
        "ordered": OrderedDict(a=1), "array": np.arange(3), "text": np.array(["ab"]), "number": np.float64(1),
        "date": np.datetime64("2020-01-01"), "mask": np.ones(2, bool), "generator": torch.get_rng_state(),
        "numpy": np.random.default_rng(0).bit_generator.state, "size": torch.Size([1, 2]),
    }  # fmt: skip
    for zipped in (True, False):
        if not zipped:  # torch itself cannot load it from the old format
            del content["uint16"]
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        loaded = safe_torch_load(tmp_path / "a.pt")
        assert loaded["tied"][0] is loaded["tied"][1]
        assert loaded.keys() == content.keys()
        left_out = {"nan", "float8"}
        deep_compare(
            {k: v for k, v in loaded.items() if k not in left_out},
            {k: v for k, v in content.items() if k not in left_out},
        )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Validating sparse tensor invariants")
def test_sparse_tensors_load(tmp_path: Path) -> None:
    torch.save({"sparse": torch.eye(3).to_sparse(), "rows": torch.eye(3).to_sparse_csr()}, tmp_path / "a.pt")

    loaded = safe_torch_load(tmp_path / "a.pt")

    assert loaded["sparse"].to_dense().tolist() == loaded["rows"].to_dense().tolist() == torch.eye(3).tolist()
