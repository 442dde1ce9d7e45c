"""Checkpoint files: whole or not there, checked before anything is loaded, and never run."""

from __future__ import annotations

import datetime
import errno
import gzip
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer.checkpoint import CorruptCheckpointError, UnsafeCheckpointError, check_file, glob_filter, safe_torch_load
from composer.checkpoint.durable import (
    UNDELIVERED,
    atomic_write,
    make_scratch_folder,
    remove_leftovers,
    replace_link,
    scratch_folder,
)
from composer.checkpoint.file import append_checksum, read_file, write_file
from composer.checkpoint.names import check_file_name, counts_of_name
from composer.checkpoint.saver import CheckpointWriter
from composer.testing import deep_compare, run_on_ranks
from composer.utils import CompressorNotFound

CORRUPTIONS = int(os.environ.get("COMPOSER_CORRUPTIONS", "1000"))


def content(seed: int = 0) -> dict[str, Any]:
    """Every kind of value that a run saves."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(20, 3, generator=generator)
    return {
        "state": {
            "model": {"weight": weights, "tied": weights, "count": torch.tensor(3)},
            "timestamp": {"Timestamp": {"batch": 5, "total_wct": datetime.timedelta(seconds=1.5)}},
            "metadata": {"torch_version": torch.__version__},
        },
        "has_checksum": True,
        "rng": [
            {
                "python": random.Random(seed).getstate(),
                "numpy": np.random.RandomState(seed).get_state(),
                "torch": generator.get_state(),
                "scalar": np.float64(0.5),
            }
        ],
    }


@pytest.mark.parametrize(
    "name", ["a.pt", "a", "a.pt.gz", "a.pt.bz2", "a.pt.xz", "a.tar", "a.tar.gz", "a.tgz", "a.tar.bz2", "a.tar.lzma"]
)
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    extension = name.rpartition(".")[2]
    program = {"bz2": "bzip2", "gz": "gzip", "xz": "xz"}.get(extension, "sh")
    if ".pt." in name and shutil.which(program) is None:
        pytest.skip(f"needs the program {program}")
    write_file(content(), tmp_path / "folder" / name)
    loaded = read_file(tmp_path / "folder" / name)

    deep_compare(loaded, content())
    assert loaded["state"]["model"]["weight"].data_ptr() == loaded["state"]["model"]["tied"].data_ptr()
    assert check_file(tmp_path / "folder" / name) == name
    deep_compare(safe_torch_load(tmp_path / "folder" / name), content())
    assert os.listdir(tmp_path / "folder") == [name]


def test_torch_and_unzip_read_a_file_with_a_checksum(tmp_path: Path) -> None:
    write_file({"state": {"model": {"weight": torch.ones(2)}}}, tmp_path / "a.pt")

    assert torch.load(tmp_path / "a.pt")["state"]["model"]["weight"].tolist() == [1, 1]
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None


def corrupt(data: bytes, choose: random.Random, other: bytes) -> bytes:
    """Torn, truncated, altered, or another file's content."""
    kind, changed = choose.randrange(7), bytearray(data)
    if kind == 0:
        return data[: choose.randrange(len(data))]
    if kind == 1:
        changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    elif kind == 2:
        for _ in range(5):
            changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    elif kind == 3:  # a block that never reached the disk
        start = choose.randrange(len(data))
        changed[start : start + 512] = bytes(len(changed[start : start + 512]))
    elif kind == 4:
        changed += choose.randbytes(choose.randrange(1, 100))
    elif kind == 5:  # the head of one file, the rest of another
        cut = choose.randrange(min(len(data), len(other)))
        return data[:cut] + other[cut:]
    else:
        first, second = (choose.randrange(len(data)) for _ in range(2))
        changed[first], changed[second] = changed[second], changed[first]
    return bytes(changed)


def test_no_corruption_loads(tmp_path: Path) -> None:
    write_file(content(0), tmp_path / "a.pt")
    write_file(content(1), tmp_path / "b.pt")
    intact, other = (tmp_path / "a.pt").read_bytes(), (tmp_path / "b.pt").read_bytes()
    choose, tried = random.Random(0), 0
    while tried < CORRUPTIONS:
        broken = corrupt(intact, choose, other)
        if broken in (intact, other):
            continue
        tried += 1
        (tmp_path / "a.pt").write_bytes(broken)
        with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
            read_file(tmp_path / "a.pt")


def test_checksums_are_the_same_without_the_fast_library(tmp_path: Path) -> None:
    """A file that one machine wrote is checked on another one, for which there is no wheel of isal."""
    write_file(content(), tmp_path / "a.pt")
    program = """
import sys
sys.modules["isal"] = None
from composer.checkpoint import check_file, file
import zlib
assert file.crc32 is zlib.crc32
print(check_file(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a.pt"], capture_output=True, text=True, check=True
    )

    assert done.stdout == "a.pt\n"


def test_without_the_checksums_of_torch_nothing_is_written(tmp_path: Path) -> None:
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.raises(RuntimeError, match=r"call `torch.serialization.set_crc32_options\(True\)`"):
            write_file(content(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(crc32)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_an_unknown_format_is_not_taken_for_a_sound_one(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_file(content(), path)
    path.write_bytes(path.read_bytes().replace(b"composer-checkpoint-2 ", b"composer-checkpoint-3 "))

    with pytest.raises(CorruptCheckpointError, match="cut off or altered"):
        read_file(path)


def test_a_corrupted_archive_does_not_load_either(tmp_path: Path) -> None:
    choose = random.Random(1)
    for name in ("a.tar", "a.tgz", "a.pt.gz"):
        write_file(content(0), tmp_path / name)
        intact = (tmp_path / name).read_bytes()
        for _ in range(60):
            broken = bytearray(intact[: choose.randrange(len(intact))] if choose.random() < 0.5 else intact)
            if broken:
                broken[choose.randrange(len(broken))] ^= 1 << choose.randrange(8)
            (tmp_path / name).write_bytes(broken)
            try:  # headers of archives have bits that mean nothing
                loaded = read_file(tmp_path / name)
            except (CorruptCheckpointError, OSError):
                continue
            deep_compare(loaded, content(0))


def test_a_file_without_seal_is_checked_by_its_archive(tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    torch.save({"state": {"model": {"weight": torch.randn(1000)}}}, path)
    assert check_file(path) is None
    deep_compare(safe_torch_load(path), torch.load(path))
    data = bytearray(path.read_bytes())
    data[data.index(b"data/0") + 2000] ^= 1
    path.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match=r"its member .*data/0"):
        safe_torch_load(path)


def test_a_seal_that_was_cut_off_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(content(), path)

    with pytest.raises(CorruptCheckpointError, match="missing or altered"):
        safe_torch_load(path)


def test_damage_inside_an_archive_is_told_of_the_archive(tmp_path: Path) -> None:
    torn = tmp_path / "composer_states.pt"
    write_file(content(), torn)
    torn.write_bytes(torn.read_bytes()[:-200])
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(torn, torn.name)

    for look in (read_file, check_file):
        with pytest.raises(CorruptCheckpointError, match=r"/a\.tar' is damaged"):
            look(tmp_path / "a.tar")


def test_an_empty_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.pt").touch()
    with pytest.raises(CorruptCheckpointError, match="empty"):
        read_file(tmp_path / "a.pt")


def test_a_missing_file_is_no_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        read_file(tmp_path / "a.pt")


def test_a_seal_tells_the_name(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({}, path)
    append_checksum(path, "ep1.pt")

    assert check_file(path) == "ep1.pt"


class Custom:
    def __init__(self) -> None:
        self.value = 3


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["a.pt", "old.pt", "a.pt.gz"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_protocol_that_torch_does_not_read_safely_is_named(tmp_path: Path, protocol: int, name: str) -> None:
    weights, plain, path = {"a": torch.arange(3)}, tmp_path / "plain.pt", tmp_path / name
    torch.save(weights, plain, pickle_protocol=protocol, _use_new_zipfile_serialization=name != "old.pt")
    path.write_bytes(gzip.compress(plain.read_bytes()) if name.endswith(".gz") else plain.read_bytes())

    if protocol < 4:
        deep_compare(read_file(path), weights)
        return
    with pytest.raises(UnsafeCheckpointError, match=r"written for pickles of protocol 2.*weights_only=False") as caught:
        read_file(path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_torch_did_not_write_is_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"a": 1}, protocol=5))

    with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
        read_file(tmp_path / "a.pt")


def test_a_type_loads_once_it_is_allowed(tmp_path: Path) -> None:
    write_file({"state": {"callbacks": {"Mine": Custom()}}}, tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match="Custom"):
        read_file(tmp_path / "a.pt")
    with torch.serialization.safe_globals([Custom]):
        loaded = read_file(tmp_path / "a.pt")

    assert loaded["state"]["callbacks"]["Mine"].value == 3


# ---- durability ----


def test_a_failing_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_file({"state": 1}, path)

    def explode() -> None:
        raise ValueError("in the middle")

    class Bomb:
        def __reduce__(self) -> Any:
            explode()

    with pytest.raises(ValueError, match="in the middle"):
        write_file({"state": torch.ones(1000), "bomb": Bomb()}, path)
    assert os.listdir(tmp_path) == ["a.pt"]
    assert read_file(path) == {"state": 1}


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file({"state": 1}, tmp_path / "a.pt")
    real = torch.save

    def save(obj: Any, file: Any, **options: Any) -> None:
        with open("/dev/full", "wb") as full:
            full.write(b"x")
            full.flush()
        real(obj, file, **options)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(
        OSError, match=r"Could not save .*a\.pt.*No space left.*Files saved earlier are unchanged"
    ) as caught:
        write_file({"state": 2}, tmp_path / "a.pt")

    assert caught.value.errno == errno.ENOSPC
    assert read_file(tmp_path / "a.pt") == {"state": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def write_beyond_the_limit(folder: Path) -> str:
    """The system lets this process write no file over a hundred kilobytes, as if the disk were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write_file({"state": 1}, folder / "a.pt")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write_file({"state": torch.ones(1_000_000)}, folder / "a.pt")
    except OSError as error:
        return str(error)
    return "no error"


def test_torchs_own_writer_fails_clearly_too(tmp_path: Path) -> None:
    [message] = run_on_ranks(write_beyond_the_limit, 1, tmp_path, backend=None)

    assert "Could not save" in message
    assert "a.pt" in message
    assert os.listdir(tmp_path) == ["a.pt"]
    assert read_file(tmp_path / "a.pt") == {"state": 1}


def test_a_file_that_cannot_be_created_is_named_without_its_temporary_name(tmp_path: Path) -> None:
    name = "a" * 250 + ".pt"  # with the suffix of the temporary file it is too long

    with pytest.raises(OSError, match="Check its folder, or save elsewhere") as caught:
        write_file({"state": 1}, tmp_path / name)

    assert caught.value.errno == errno.ENAMETOOLONG
    assert f"Could not save '{tmp_path}/{name}'" in str(caught.value)
    assert ".saving" not in str(caught.value)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), atomic_write(tmp_path / "a.pt"):
        raise RuntimeError("mine")


def test_a_link_moves_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a", "b"):
        (tmp_path / "folder" / name).touch()
        replace_link(tmp_path / "latest", tmp_path / "folder" / name)
        assert os.readlink(tmp_path / "latest") == f"folder/{name}"
    assert sorted(os.listdir(tmp_path)) == ["folder", "latest"]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    names = [".a.pt.0123abcd.saving", ".hidden", "a.saving", "a.pt"]
    for name in names:
        (tmp_path / name).touch()

    assert remove_leftovers(tmp_path) == names[:1]
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
    assert remove_leftovers(tmp_path / "missing") == []


def folders(path: Path) -> set[Path]:
    return {entry for entry in path.iterdir() if entry.is_dir()}


def test_scratch_folders_of_killed_processes_are_removed_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        held = []
        for name in ("download", "saving"):
            folder, remove = make_scratch_folder(name)
            held.append(remove)
            (folder / "large.pt").write_bytes(b"bytes")
            os.write(writing, f"{folder} ".encode())
        (folder / UNDELIVERED).touch()
        os.write(writing, b"end")
        signal.pause()
    told = b""
    while not told.endswith(b"end"):
        told += os.read(reading, 4096)
    download, saving = map(Path, told.decode().split()[:2])
    try:
        with scratch_folder("a") as own, scratch_folder("a") as other:
            assert {own, other, download, saving} == folders(tmp_path)  # of processes that run
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    with scratch_folder("a") as own, scratch_folder("a") as other:
        assert {own, other, saving} == folders(tmp_path)
    assert {saving, saving.with_name(f".{saving.name}.lock")} == set(tmp_path.iterdir())
    assert (saving / "large.pt").read_bytes() == b"bytes"


# ---- names and filters ----


def test_names_that_cannot_be_written_are_refused() -> None:
    check_file_name("folder/ep{epoch}.tar.gz")
    with pytest.raises(ValueError, match="does not end with a valid tarfile extension"):
        check_file_name("a.tar.zip")
    with pytest.raises(CompressorNotFound):
        check_file_name("a.pt.unknown")


def test_counts_order_names() -> None:
    pattern = "ep{epoch}-ba{batch}-rank{rank}.pt"
    names = ["ep1-ba10-rank0.pt", "ep0-ba9-rank0.pt", "ep1-ba9-rank0.pt", "latest-rank0.pt", "ep1-ba9-rank0.pt.saving"]
    counts = {name: counts_of_name(name, pattern) for name in names}
    known = sorted((name for name in names if counts[name] is not None), key=lambda name: counts[name] or ())

    assert known == ["ep0-ba9-rank0.pt", "ep1-ba9-rank0.pt", "ep1-ba10-rank0.pt"]
    assert counts_of_name("3-3.pt", "{batch}-{batch}.pt") is not None
    assert counts_of_name("3-4.pt", "{batch}-{batch}.pt") is None


def test_patterns_remove_what_they_match() -> None:
    tree = {"state": {"model": {"a.w": 1, "b.w": 2}, "list": [{"x": 1}, {"x": 2}, 3]}, "rng": [1]}
    glob_filter(["state/model/a*", "state/list/1", "state/list/0/x", "rng"])(tree)

    assert tree == {"state": {"model": {"b.w": 2}, "list": [{}, 3]}}
    with pytest.warns(UserWarning, match="matches nothing"):
        glob_filter(["state/modle/*"])(tree)
    glob_filter(["*"])(tree)
    assert tree == {}


# ---- in the background ----


def test_a_copy_is_written_while_the_original_changes(tmp_path: Path) -> None:
    writer = CheckpointWriter(asynchronous=True)
    weight = torch.zeros(1000)
    tied = weight[10:20].view(2, 5).t()
    done: list[float] = []
    for value in (1.0, 2.0):
        weight.fill_(value)
        writer.write(
            {"state": {"weight": weight, "tied": tied}, "n": value},
            str(tmp_path / f"{value}.pt"),
            lambda: done.append(1),
        )
        weight.fill_(-1)
    writer.close()

    for value in (1.0, 2.0):
        loaded = read_file(tmp_path / f"{value}.pt")
        assert loaded["state"]["weight"].eq(value).all()
        assert loaded["state"]["tied"].shape == (5, 2)
        assert (
            loaded["state"]["tied"].untyped_storage().data_ptr()
            == loaded["state"]["weight"].untyped_storage().data_ptr()
        )
        assert loaded["n"] == value
    assert done == [1, 1]


class SlowToPickle:
    """Tells when it has been pickled, which takes a while."""

    pickled = threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(0.1)
        self.pickled.set()
        return (int, ())


def test_only_bytes_are_left_to_write_in_the_background(tmp_path: Path) -> None:
    writer = CheckpointWriter(asynchronous=True)

    writer.write({"state": SlowToPickle()}, str(tmp_path / "a.pt"), lambda: None)

    assert SlowToPickle.pickled.is_set()  # Python that would run beside the next step
    writer.close()


def test_a_save_that_cannot_be_pickled_does_not_wait_for_ever(tmp_path: Path) -> None:
    writer = CheckpointWriter(asynchronous=True)

    writer.write({"state": lambda: None}, str(tmp_path / "a.pt"), lambda: None)

    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        writer.close()
    assert os.listdir(tmp_path) == []


def test_what_fails_in_the_background_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = CheckpointWriter(asynchronous=True)
    writer.write({"state": 1}, str(tmp_path / "file" / "a.pt"), lambda: None)

    with pytest.raises(FileExistsError):
        writer.close()
    writer.close()
