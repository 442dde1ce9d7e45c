"""The names of `composer.utils.checkpoint`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import composer.checkpoint
import composer.utils
from composer.utils import checkpoint
from composer.utils.checkpoint import (
    _COMPOSER_STATES_FILENAME,
    _ensure_valid_checkpoint,
    _is_rng_key,
    _torch_load_with_validation,
    _write_checkpoint_file,
)


def test_old_names_lead_to_composer_checkpoint() -> None:
    for name in ("PartialFilePath", "get_save_filename", "load_checkpoint", "save_checkpoint", "safe_torch_load"):
        assert getattr(checkpoint, name) is getattr(composer.checkpoint, name)
    assert checkpoint is composer.utils.checkpoint
    assert _COMPOSER_STATES_FILENAME == "composer_states.pt"
    assert [_is_rng_key(*pair) for pair in [("rng.0.cuda", (1, 2, 3)), ("rng.0.cuda", 1), ("state", (1, 2, 3))]] == [
        True,
        False,
        False,
    ]


def accept_small_files(path: Any, specs: Any = None) -> bool:
    return Path(path).stat().st_size < 10 and (specs is None or len(specs) == 1)


def test_validation_function_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_checkpoint_file({"a": 1}, str(tmp_path / "a.pt"))
    assert _torch_load_with_validation(tmp_path / "a.pt") == {"a": 1}
    (tmp_path / "small").write_text("x")
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", f"{__name__}.accept_small_files")

    assert _ensure_valid_checkpoint(tmp_path / "small", [(0, 1)]) == tmp_path / "small"
    with pytest.raises(ValueError, match=re.escape(f"`{__name__}.accept_small_files`")):
        _torch_load_with_validation(tmp_path / "a.pt")
