"""Compress and decompress files with command-line programs such as gzip and zstd, and recognize archives by name."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


class CompressorNotFound(FileNotFoundError):
    """No compressor is known for a file name, or its program is not installed."""


class CliCompressor:
    """A compression program that reads standard input and writes standard output.

    Args:
        extension: The file extension, without a dot.
        cmd: The name of the program; None: the extension.
    """

    def __init__(self, extension: str, cmd: str | None = None) -> None:
        self.extension = extension
        self.cmd = extension if cmd is None else cmd

    def __repr__(self) -> str:
        return f"CliCompressor({self.extension!r}, {self.cmd!r})"

    @property
    def exists(self) -> bool:
        """True if the program is installed."""
        return shutil.which(self.cmd) is not None

    def check_exists(self) -> None:
        """Raise if the program is not installed.

        Raises:
            CompressorNotFound: The program is not installed.
        """
        if not self.exists:
            raise CompressorNotFound(
                f'Could not find command "{self.cmd}" in the PATH. Install it to read and write '
                f"'.{self.extension}' files."
            )

    @contextmanager
    def compress(self, out_filename: str) -> Iterator[IO[bytes]]:
        """Write a compressed file.

        Args:
            out_filename: The file to write.

        Yields:
            A stream; data written to it is compressed into the file.

        Raises:
            CompressorNotFound: The program is not installed.
            IOError: The program failed.
        """
        self.check_exists()
        with open(out_filename, "wb") as target, tempfile.TemporaryFile() as errors:
            program = subprocess.Popen([self.cmd], stdin=subprocess.PIPE, stdout=target, stderr=errors)
            assert program.stdin is not None
            with _waiting_for(program):
                try:
                    yield program.stdin
                    program.stdin.close()
                except BrokenPipeError:  # the program exited early
                    if program.wait() == 0:
                        raise
            _check(program, errors, f"write {out_filename!r}")

    @contextmanager
    def decompress(self, in_filename: str) -> Iterator[IO[bytes]]:
        """Read a compressed file.

        Args:
            in_filename: The file to read.

        Yields:
            A stream of the decompressed bytes. It cannot seek and need not be read to the end.

        Raises:
            CompressorNotFound: The program is not installed.
            IOError: The program failed, for example because the file is damaged.
        """
        self.check_exists()
        with open(in_filename, "rb") as source, tempfile.TemporaryFile() as errors:
            program = subprocess.Popen([self.cmd, "-dc"], stdin=source, stdout=subprocess.PIPE, stderr=errors)
            assert program.stdout is not None
            with _waiting_for(program):
                yield program.stdout
                at_end = not program.stdout.closed and not program.stdout.read(1)
                program.stdout.close()
            _check(program, errors, f"read {in_filename!r}", may_stop_early=not at_end)


@contextmanager
def _waiting_for(program: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for the program at the end of the body; kill it if the body raises."""
    try:
        yield
    except BaseException:
        program.kill()
        raise
    finally:
        for stream in (program.stdin, program.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # flushing the buffer may fail
                    stream.close()
        program.wait()


def _check(program: subprocess.Popen[bytes], errors: IO[bytes], task: str, may_stop_early: bool = False) -> None:
    if program.returncode == 0 or (may_stop_early and program.returncode == -signal.SIGPIPE):
        return
    errors.seek(0)
    message = errors.read().decode(errors="replace").strip()
    raise OSError(f"Could not {task}: {program.args!r} ended with exit code {program.returncode}: {message}")


KNOWN_COMPRESSORS = [
    CliCompressor("bz2", "bzip2"),
    CliCompressor("gz", "gzip"),
    CliCompressor("lz4"),
    CliCompressor("lzma"),
    CliCompressor("lzo", "lzop"),
    CliCompressor("xz"),
    CliCompressor("zst", "zstd"),
]
"""The supported compressors. Each needs its program on the PATH."""


def is_compressed_pt(filename: str) -> bool:
    """Return True if a file name is that of a compressed checkpoint, such as "ep1.pt.gz".

    Example:
        >>> is_compressed_pt("ep1.pt.gz"), is_compressed_pt("ep1.pt"), is_compressed_pt("ep1.pt.symlink")
        (True, False, False)
    """
    parts = filename.split(".")
    return len(parts) >= 2 and parts[-2] == "pt" and parts[-1] != "symlink"


def is_tar(name: str | Path) -> bool:
    """Return True if a file name is that of a tar archive, compressed or not.

    Example:
        >>> is_tar("a.tar"), is_tar("a.tar.gz"), is_tar("a.tgz"), is_tar("tar")
        (True, True, True, False)
    """
    parts = str(name).split(".")
    return len(parts) > 1 and ("tar" in parts[-2:] or parts[-1] == "tgz")


def get_compressor(filename: str) -> CliCompressor:
    """Return the compressor for the extension of a file name.

    Raises:
        CompressorNotFound: There is no compressor for this extension.
    """
    extension = filename.rpartition(".")[2]
    for compressor in KNOWN_COMPRESSORS:
        if compressor.extension == extension:
            return compressor
    known = ", ".join(f"'.{compressor.extension}'" for compressor in KNOWN_COMPRESSORS)
    raise CompressorNotFound(f'Could not find compressor for "{filename}". Use one of the extensions {known}.')
