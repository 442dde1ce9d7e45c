"""Traces are only written to an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer.utils import ensure_folder_is_empty


def test_an_empty_or_missing_folder_is_empty(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ".hidden").touch()

    ensure_folder_is_empty(tmp_path)
    ensure_folder_is_empty(str(tmp_path / "missing"))


def test_a_file_anywhere_under_a_folder_makes_it_not_empty(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").touch()

    with pytest.raises(FileExistsError, match=r"must be empty, but it contains '.*sub.file'"):
        ensure_folder_is_empty(tmp_path)
