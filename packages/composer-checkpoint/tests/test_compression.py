"""Compression through command-line programs."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.utils import (
    KNOWN_COMPRESSORS,
    CliCompressor,
    CompressorNotFound,
    get_compressor,
    is_compressed_pt,
    is_tar,
)

DATA = bytes(range(256)) * 1000


def program(folder: Path, code: str) -> CliCompressor:
    """A compressor that runs Python code, so that no program needs to be installed."""
    script = folder / "compressor"
    script.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    script.chmod(0o755)
    return CliCompressor("ext", str(script))


def installed(extension: str) -> CliCompressor:
    compressor = get_compressor(f"a.{extension}")
    if not compressor.exists:
        pytest.skip(f"{compressor.cmd} is not installed")
    return compressor


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.pt.gz", True),
        ("a.pt.unknown", True),
        ("a.pt", False),
        ("a.pt.symlink", False),
        ("a.gz", False),
        ("pt", False),
        ("a.pt.tar.gz", False),
    ],
)
def test_compressed_checkpoints_are_known_by_their_name(name: str, expected: bool) -> None:
    assert expected == is_compressed_pt(name)


def test_known_extensions_and_their_programs() -> None:
    expected = {
        "bz2": "bzip2",
        "gz": "gzip",
        "lz4": "lz4",
        "lzma": "lzma",
        "lzo": "lzop",
        "xz": "xz",
        "zst": "zstd",
    }

    assert expected == {compressor.extension: compressor.cmd for compressor in KNOWN_COMPRESSORS}
    assert all(get_compressor(f"a.pt.{extension}").extension == extension for extension in expected)
    assert "CliCompressor('gz', 'gzip')" == repr(get_compressor("a.gz"))


def test_an_unknown_extension_has_no_compressor() -> None:
    with pytest.raises(CompressorNotFound, match=r'Could not find compressor for "foo\.pt\.unknown"\.'):
        get_compressor("foo.pt.unknown")


def test_a_program_that_is_not_installed_is_named(tmp_path: Path) -> None:
    compressor = CliCompressor("foo", "no_such_program")

    assert not compressor.exists
    for use in (
        compressor.check_exists,
        lambda: compressor.compress(str(tmp_path / "a")).__enter__(),
        lambda: compressor.decompress(str(tmp_path / "a")).__enter__(),
    ):
        with pytest.raises(CompressorNotFound, match='Could not find command "no_such_program" in the PATH'):
            use()
    assert issubclass(CompressorNotFound, FileNotFoundError)


@pytest.mark.parametrize("extension", [compressor.extension for compressor in KNOWN_COMPRESSORS])
def test_what_was_compressed_can_be_decompressed(extension: str, tmp_path: Path) -> None:
    compressor, path = installed(extension), str(tmp_path / f"a.{extension}")

    with compressor.compress(path) as stream:
        stream.write(DATA[:1000])
        stream.write(DATA[1000:])
    with compressor.decompress(path) as stream:
        result = stream.read()

    assert DATA == result
    assert Path(path).stat().st_size < len(DATA) / 10


@pytest.mark.parametrize(("extension", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_others_can_read_the_files(extension: str, module: Any, tmp_path: Path) -> None:
    path = tmp_path / f"a.{extension}"

    with installed(extension).compress(str(path)) as stream:
        stream.write(DATA)

    assert DATA == module.decompress(path.read_bytes())


def test_a_checkpoint_can_be_written_through_a_compressor(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt.gz")

    with installed("gz").compress(path) as stream:
        torch.save({"weight": torch.ones(3)}, stream)

    with gzip.open(path) as file:
        assert [1.0, 1.0, 1.0] == torch.load(file)["weight"].tolist()


@pytest.mark.parametrize("closes", [False, True])
def test_the_stream_need_not_be_read_to_the_end(closes: bool, tmp_path: Path) -> None:
    compressor = program(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as programs that are not written in Python have it\n"
        "for _ in range(100): sys.stdout.buffer.write(bytes(1_000_000))",
    )
    (tmp_path / "a").touch()

    with compressor.decompress(str(tmp_path / "a")) as stream:
        first = stream.read(5)
        if closes:
            stream.close()

    assert bytes(5) == first


def test_a_program_that_reads_only_a_part_is_an_error_even_if_it_is_content(tmp_path: Path) -> None:
    compressor = program(tmp_path, "sys.stdin.buffer.read(1)")

    with pytest.raises(BrokenPipeError), compressor.compress(str(tmp_path / "a.ext")) as stream:
        stream.write(bytes(10_000_000))


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"not gzip")

    expected = r"Could not read '.*a.gz': .* ended with exit code 1: .*not in gzip format"
    with pytest.raises(OSError, match=expected), installed("gz").decompress(str(tmp_path / "a.gz")) as stream:
        stream.read()


@pytest.mark.parametrize("code", ["sys.stdin.buffer.read(); sys.exit('disk full')", "sys.exit('disk full')"])
def test_a_program_that_fails_is_an_error(code: str, tmp_path: Path) -> None:
    compressor = program(tmp_path, code)

    expected = r"(?s)Could not write '.*a.ext': .* ended with exit code 1: disk full"
    with pytest.raises(OSError, match=expected), compressor.compress(str(tmp_path / "a.ext")) as stream:
        stream.write(bytes(1_000_000))


@pytest.mark.parametrize("use", [CliCompressor.compress, CliCompressor.decompress])
def test_an_error_of_the_user_ends_the_program_and_is_raised(use: Any, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    compressor = program(tmp_path, "import time; time.sleep(60)")

    start = time.monotonic()

    with pytest.raises(KeyError, match="mine"), use(compressor, str(tmp_path / "a")):
        raise KeyError("mine")
    assert time.monotonic() - start < 50


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.tar", True),
        ("a.tar.gz", True),
        ("a.tgz", True),
        (Path("a.pt.tar.bz2"), True),
        ("tar", False),
        ("tgz", False),
        ("a.pt", False),
        ("a.gz", False),
        ("a.tar.gz.pt", False),
        ("tarball", False),
    ],
)
def test_tar_archives_are_known_by_their_extension(name: Any, expected: bool) -> None:
    assert expected == is_tar(name)
