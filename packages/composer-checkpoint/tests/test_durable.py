"""Flushing of files to the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer.checkpoint.durable import sync_file

_NOBODY = 65534


def test_a_file_that_its_owner_may_not_write_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch(mode=0o400)
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    if user == 0:  # nothing is forbidden to root
        tmp_path.chmod(0o755)
        os.chown("a", _NOBODY, -1)
        os.seteuid(_NOBODY)
    try:
        sync_file(Path("a"))
    finally:
        os.seteuid(user)

    assert len(synced) == 1
