"""Names of `composer.checkpoint` under the module path of the reference."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from composer.checkpoint import CorruptCheckpointError as CorruptCheckpointError
from composer.checkpoint import PartialFilePath as PartialFilePath
from composer.checkpoint import UnsafeCheckpointError as UnsafeCheckpointError
from composer.checkpoint import download_checkpoint as download_checkpoint
from composer.checkpoint import get_save_filename as get_save_filename
from composer.checkpoint import glob_filter as glob_filter
from composer.checkpoint import load_checkpoint as load_checkpoint
from composer.checkpoint import safe_torch_load as safe_torch_load
from composer.checkpoint import save_checkpoint as save_checkpoint
from composer.checkpoint.file import STATES as _COMPOSER_STATES_FILENAME
from composer.checkpoint.file import write_file as _write_checkpoint_file
from composer.checkpoint.run import validate

__all__ = [
    "_COMPOSER_STATES_FILENAME",
    "PartialFilePath",
    "_ensure_valid_checkpoint",
    "_is_rng_key",
    "_torch_load_with_validation",
    "_write_checkpoint_file",
    "download_checkpoint",
    "get_save_filename",
    "glob_filter",
    "load_checkpoint",
    "safe_torch_load",
    "save_checkpoint",
]

_GENERATORS = ("cuda", "torch", "python", "numpy")


def _ensure_valid_checkpoint(
    checkpoint_filepath: str | os.PathLike[str], specs: Sequence[tuple[int, int]] | None = None
) -> str | os.PathLike[str]:
    """Call the function that `CHECKPOINT_VALIDATION_FUNCTION` names, if any, which may refuse the file.

    Args:
        checkpoint_filepath: The file.
        specs: The parts of it to read, as offsets and lengths in bytes; None: all.

    Returns:
        `checkpoint_filepath`.

    Raises:
        ValueError: The function refuses the file.
    """
    validate(checkpoint_filepath, specs)
    return checkpoint_filepath


def _torch_load_with_validation(checkpoint_filepath: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Load a file with `safe_torch_load` after `_ensure_valid_checkpoint`."""
    return safe_torch_load(_ensure_valid_checkpoint(checkpoint_filepath), map_location=map_location)


def _is_rng_key(key: str, value: Any) -> bool:
    """Return True if an entry of a flat checkpoint in shards is the state of a random generator.

    Args:
        key: The path of the entry, such as `rng.0.cuda`.
        value: The entry.
    """
    return key.startswith("rng") and key.endswith(_GENERATORS) and isinstance(value, tuple) and len(value) == 3
