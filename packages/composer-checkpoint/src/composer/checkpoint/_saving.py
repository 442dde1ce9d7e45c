"""Saving a run, or its weights, to one file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from composer.checkpoint._container import write_file
from composer.checkpoint._filter import IgnoreKeys
from composer.checkpoint._left_out import filter_and_note
from composer.checkpoint._names import check_path, get_save_filename
from composer.checkpoint._resumption_parts import attached
from composer.checkpoint.sharded_tensors import gathered
from composer.utils import dist, reproducibility

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["collect", "save_checkpoint"]

_WEIGHTS = ("model", "integrations", "metadata")


def save_checkpoint(
    state: State,
    filename: str = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys | None = None,
) -> str | None:
    """Save a run to a file. To be called on every rank; the first writes.

    The file is whole, sealed with a checksum and on the disk when this returns, or not there at all.

    Args:
        state: The run.
        filename: The path; a format string with the variables of
            `composer.utils.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE`. Its extension tells the format: see `write_file`.
        weights_only: Whether to save the model only, from which training cannot go on.
        ignore_keys: What to leave out; see `glob_filter`.

    Returns:
        The path; None on ranks that do not write.

    Raises:
        OSError: It cannot be written; earlier files are untouched.
        TypeError: `filename` is no path.
        ValueError: `filename` has an unknown field, or is a folder.
    """
    check_path("filename", filename)
    path = get_save_filename(state, os.path.expanduser(os.fspath(filename)))
    content = collect(state, weights_only=weights_only, ignore_keys=ignore_keys)
    if dist.get_global_rank() != 0:
        return None
    write_file(content, path)
    return path


def collect(
    state: State, *, weights_only: bool = False, ignore_keys: IgnoreKeys | None = None, gather: bool = True
) -> dict[str, Any]:
    """Return what a checkpoint holds: `state`, and unless `weights_only` the generators (`rng`) and `resumption`.

    If `ignore_keys` leaves something out, `left_out` lists its paths.

    Tensors are the run's own, not copies, but for those that are divided among ranks: they are gathered on the host,
    with `gather`. A collective operation.
    """
    saved = state.state_dict()
    content: dict[str, Any] = {"state": {key: saved[key] for key in _WEIGHTS} if weights_only else saved}
    content["state"]["metadata"]["sealed"] = True
    if not weights_only:
        content["rng"] = reproducibility.get_rng_state()
        part = attached(state)
        if part is not None:
            content["resumption"] = part.state_dict()
    filter_and_note(ignore_keys, content)
    return gathered(content) if gather and state.fsdp_enabled else content
