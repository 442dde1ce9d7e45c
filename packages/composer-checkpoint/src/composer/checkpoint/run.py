"""Saving and loading a whole run, or the weights of one, from any training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.checkpoint.download import get_file
from composer.checkpoint.durable import follow_link
from composer.checkpoint.file import STATES, read_file, write_file
from composer.checkpoint.names import check_nonempty_path, check_path, get_save_filename
from composer.checkpoint.ranks import on_each_node
from composer.checkpoint.safe_load import CorruptCheckpointError, check_loadable
from composer.checkpoint.selection import IgnoreKeys, apply_filter, check_complete
from composer.checkpoint.sharded_tensors import gather_tensors, is_sharded, shard_tensors
from composer.checkpoint.shards import download_run, fill_shards, is_sharded_run, read_run
from composer.checkpoint.storage import without_password
from composer.core import State
from composer.core.saving import add_required_algorithms, upgrade_state_dict
from composer.utils import dist, import_object, is_uri, partial_format, reproducibility
from composer.utils.misc import unwrapped_model

if TYPE_CHECKING:
    from composer.core.passes import PassInput
    from composer.loggers import Logger

log = logging.getLogger(__name__)

VALIDATION_VARIABLE = "CHECKPOINT_VALIDATION_FUNCTION"
_WEIGHTS = ("model", "integrations", "metadata")
_SHARDED_PARTS = ("model", "optimizers", "algorithms")


def save_checkpoint(
    state: State,
    filename: str = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys | None = None,
) -> str | None:
    """Save a run to a file. Call it on every rank; rank 0 writes.

    When this returns, the file is complete, with a checksum, and on the disk. If it fails, there is no file.

    Args:
        state: The run.
        filename: The path; a format string with the variables of
            `composer.utils.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE`. Its extension is the format: see
            `composer.checkpoint.file.write_file`.
        weights_only: Save the model only, from which training cannot continue.
        ignore_keys: The parts to leave out; see `glob_filter`.

    Returns:
        The path; None on ranks that do not write.

    Raises:
        OSError: It cannot be written; earlier files are unchanged.
        TypeError: `state` is not a `State`, `filename` is not a path, or a value could not be loaded again.
        ValueError: `filename` has an unknown field, or is a folder.
    """
    _check_state(state)
    check_path("filename", filename)
    path = get_save_filename(state, os.path.expanduser(os.fspath(filename)))
    content = collect(state, weights_only=weights_only, ignore_keys=ignore_keys)
    if dist.get_global_rank() != 0:
        return None
    check_loadable(content)
    write_file(content, path)
    return path


def collect(
    state: State, *, weights_only: bool = False, ignore_keys: IgnoreKeys | None = None, gather: bool = True
) -> dict[str, Any]:
    """Return the content of a checkpoint: `state`, `has_checksum` and, unless `weights_only`, `rng` and `resumption`.

    Tensors are the run's own, not copies, except those that are sharded among ranks: with `gather` they are gathered on
    the host. A collective operation.
    """
    saved = state.state_dict()
    content: dict[str, Any] = {"state": {key: saved[key] for key in _WEIGHTS} if weights_only else saved}
    content["has_checksum"] = True  # readers of the file require it then
    if not weights_only:
        part = state.resumption
        # Until `fit` restores them, the generators of a loaded run are not the global ones.
        content["rng"] = getattr(part, "loaded_generators", None) or reproducibility.get_rng_state()
        if part is not None:
            content["resumption"] = part.state_dict()
    apply_filter(ignore_keys, content)
    return gather_tensors(content) if gather and state.fsdp_enabled else content


def load_checkpoint(
    path: str | os.PathLike[str],
    state: State,
    logger: Logger | None = None,
    object_store: Any = None,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys | None = None,
    exclude_algorithms: Sequence[str] | None = None,
    algorithm_passes: PassInput = None,
    *,
    shard: Callable[[], None] | None = None,
) -> list[dict[str, Any]] | None:
    """Load a run from a checkpoint that the Trainer or `save_checkpoint` wrote. Call it on every rank.

    For the folders that `save_checkpoint_to_disk` writes, there is `composer.checkpoint.load.load_checkpoint`.

    The file is checked before anything of it is interpreted, and loading runs no code from it. If it was saved without
    the model, the optimizers or the state of another object (`save_ignore_keys`), these are unchanged in `state`, with
    a warning.

    Args:
        path: A local path or a URI; may hold `{run_name}`, and `{rank}` for runs whose first rank wrote.
        state: The run to load into.
        logger: Passed to algorithms that have to be applied first.
        object_store: The object store, or the logger that stores files, that `path` is in.
        load_weights_only: Load the model only; time, optimizer and everything else stay.
        strict_model_weights: True if the model's keys must match those of the file exactly, except those that
            `ignore_keys` leaves out.
        progress_bar: Show the progress of a download.
        ignore_keys: The parts not to load; see `glob_filter`.
        exclude_algorithms: Class names of algorithms of the saved run that are not to be applied.
        algorithm_passes: Passes that order the algorithms.
        shard: A function that shards the model among ranks, if necessary. Called once, after the algorithms of the
            saved run were applied to the model.

    Returns:
        The states of the random generators, one dict per rank; None if there are none or only weights are loaded.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: The file is incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.
        TypeError: `state` is not a `State`, or `path` is not a path.
        ValueError: `path` is empty; or the file lacks the timestamp, or with `load_weights_only` the model.
        RuntimeError: The model's keys do not match, or ranks loaded different files.
    """
    check_nonempty_path("path", path)
    _check_state(state)
    with _opened(path, state.run_name, object_store, progress_bar) as (content, is_in_shards):
        check_complete(os.fspath(path), content, state, load_weights_only)
        ignored = {*content.get("state", {}).get("model", ())}
        apply_filter(ignore_keys, content)
        ignored -= {*content.get("state", {}).get("model", ())}
        if load_weights_only:
            content.get("state", {}).pop("optimizers", None)
        if "model" in content.get("state", {}):
            add_required_algorithms(
                state, upgrade_state_dict(content["state"]), logger, exclude_algorithms, algorithm_passes
            )
        if shard is not None:
            shard()
        if is_in_shards or any(map(is_sharded, state.model.parameters())):
            _shard_content(content, state)
    saved, unknown = content.get("state"), ignored
    if ignored:  # the model keeps its own values; names that it does not have yet stay unknown
        own = state.get_model_state_dict()
        (saved or {}).get("model", {}).update({key: own[key] for key in ignored & own.keys()})
        unknown = ignored - own.keys()
    if saved is None:
        log.info("Nothing is loaded from %s: all parts are left out.", without_password(os.fspath(path)))
        return None
    strict = strict_model_weights and not unknown
    if load_weights_only:
        if "model" in saved:
            state.load_model_state(saved, logger, strict, exclude_algorithms, algorithm_passes)
        return None
    part = state.resumption
    if part is not None:
        part.before_load(content)
    state.load_state_dict(saved, logger, strict, exclude_algorithms, algorithm_passes)
    if part is not None:
        part.after_load(content)
    batches = dist.all_gather_object(state.timestamp.batch.value)
    if len(set(batches)) > 1:
        raise RuntimeError(
            f"The ranks loaded checkpoints of different batches: {batches}. Give all of them the same file."
        )
    rng: list[dict[str, Any]] | None = content.get("rng")
    return rng


def _check_state(state: State) -> None:
    if not isinstance(state, State):
        raise TypeError(f"`state` must be a `composer.State`, got {state!r}.")


@contextmanager
def _opened(
    path: str | os.PathLike[str], run_name: str, object_store: Any, progress_bar: bool
) -> Iterator[tuple[Any, bool]]:
    """Fetch, check and read a checkpoint: `{"state": ..., "rng": [...], "resumption": ...}`, as far as it has them.

    Yield it, and True if it is in shards, which can be read inside of the context.
    """
    # Only rank 0 writes, whichever rank reads.
    given = os.fspath(path) if object_store is not None else os.path.expanduser(path)
    name = partial_format(given, run_name=run_name, rank=0, local_rank=0, node_rank=0)
    with local_checkpoint(name, object_store, progress_bar) as file:
        validate(str(file))
        if file.is_dir() and not is_sharded_run(file):
            raise CorruptCheckpointError(
                file, f"it is a folder that lacks {STATES!r}; a checkpoint in one file is loaded by the file's path"
            )
        is_in_shards = is_sharded_run(file)
        content = (read_run if is_in_shards else read_file)(file)
        if not isinstance(content, dict) or not ({"state", "rng"} & content.keys()):
            raise ValueError(
                f"{without_password(name)!r} is not a checkpoint of a run: it lacks the entry 'state'. Load the "
                f"weights of a model with `model.load_state_dict(torch.load(...))`."
            )
        yield content, is_in_shards


def download_checkpoint(
    path: str, node_checkpoint_folder: str, object_store: Any = None, progress_bar: bool = True
) -> tuple[str, None, bool]:
    """Download a checkpoint to a folder of this node.

    Args:
        path: A local path or a URI.
        node_checkpoint_folder: The folder.
        object_store: An object store, or a logger that stores files.
        progress_bar: Show the progress.

    Returns:
        The path of the file, and None and False, for programs that expect three values.
    """
    file = os.path.join(node_checkpoint_folder, os.path.basename(path))
    get_file(path, file, object_store, progress_bar=progress_bar)
    return file, None, False


@contextmanager
def local_checkpoint(name: str, object_store: Any = None, progress_bar: bool = False) -> Iterator[Path]:
    """Yield the local path of a checkpoint; the first process of each node downloads it for the others.

    A collective operation if `name` is a URI or in `object_store`.
    """
    if object_store is None and not is_uri(name):
        yield follow_link(Path(name))
        return
    file_name = Path(name).name
    with on_each_node(lambda folder: fetch(name, folder / file_name, object_store, progress_bar)) as folder:
        yield folder / file_name


def validate(file: str | os.PathLike[str], *specs: Any) -> None:
    """Call the function that `CHECKPOINT_VALIDATION_FUNCTION` names, if any.

    Args:
        file: The file.
        *specs: Further arguments of the function.

    Raises:
        ValueError: The function refuses the file.
    """
    function = os.environ.get(VALIDATION_VARIABLE)
    if function is None:
        return
    module, _, attribute = function.rpartition(".")
    if not import_object(f"{module}:{attribute}")(file, *specs):
        raise ValueError(
            f"`{function}`, which {VALIDATION_VARIABLE} names, refuses the checkpoint {os.fspath(file)!r}."
        )


def _shard_content(content: dict[str, Any], state: State) -> None:
    """Keep or read this rank's part of each tensor that belongs to a sharded parameter."""
    named = unwrapped_model(state.model).named_parameters(remove_duplicate=False)  # tied weights have several names
    own = {name: parameter for name, parameter in named if is_sharded(parameter)}
    parameters = {**own, **{f"module.{name}": p for name, p in own.items()}}  # files of DDP have this prefix
    saved = content.get("state") or {}
    if parameters:
        saved.update({part: shard_tensors(saved[part], parameters) for part in _SHARDED_PARTS if part in saved})
    content.update(fill_shards(content, parameters))


def read_checkpoint(path: str | os.PathLike[str], keys: Sequence[str] | None = None) -> Any:
    """Read a checkpoint onto the CPU, running no code from it. Call it on every rank.

    Args:
        path: Its path or URI: a file of any format that the Trainer writes, or a folder of shards.
        keys: The requested keys of its entry `state`, such as `["model"]`; None: all. Shards of other keys are not
            read.

    Returns:
        The saved content, with whole tensors: for a checkpoint of a run `{"state": {"model": {...}, ...}, "rng":
        [...]}`.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: It is incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        ...     torch.save({"state": {"model": {"weight": torch.ones(2)}, "run_name": "a"}}, file.name)
        ...     read_checkpoint(file.name, keys=["model"])
        {'state': {'model': {'weight': tensor([1., 1.])}}}
    """
    check_nonempty_path("path", path)
    text = os.path.expanduser(os.fspath(path))
    with local_checkpoint(text) as file:
        return read_local(file, keys)


def fetch(path: str, target: Path, object_store: Any = None, progress_bar: bool = False) -> None:
    """Download a checkpoint, a file or a folder of shards, to a local path."""
    if object_store is None and download_run(path, target, progress_bar):
        return
    get_file(path, target, object_store, progress_bar=progress_bar)


def read_local(path: Path, keys: Sequence[str] | None = None) -> Any:
    """Read a checkpoint at a local path, as `read_checkpoint` does; not a collective operation."""
    content = (read_run if is_sharded_run(path) else read_file)(path)
    state = content.get("state") if isinstance(content, dict) else None
    if keys is not None and isinstance(state, dict):
        content["state"] = {key: state[key] for key in keys if key in state}
    return fill_shards(content, {})
