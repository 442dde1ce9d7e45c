"""Loading a run, or its weights, from a file."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.checkpoint._container import read_file
from composer.checkpoint._filter import IgnoreKeys, apply_filter
from composer.checkpoint._left_out import LEFT_OUT, check_complete, drop, fill, warn_of
from composer.checkpoint._names import was_swapped
from composer.checkpoint._ranks import on_each_node
from composer.checkpoint._resumption_parts import attached
from composer.checkpoint._seal import CorruptCheckpointError
from composer.checkpoint._sharded_run import STATES, download_run, fill_shards, is_sharded_run, read_run
from composer.checkpoint.sharded_tensors import is_sharded, sharded_as
from composer.core.saving import add_required_algorithms, upgrade_state_dict
from composer.utils import dist, import_object, is_uri, partial_format
from composer.utils.misc import unwrapped_model

if TYPE_CHECKING:
    from composer.core import State
    from composer.core.passes import PassInput
    from composer.loggers import Logger

__all__ = ["download_checkpoint", "load_checkpoint", "restore"]

log = logging.getLogger(__name__)

_DIVIDED = ("model", "optimizers", "algorithms")

VALIDATION_VARIABLE = "CHECKPOINT_VALIDATION_FUNCTION"


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
) -> list[dict[str, Any]] | None:
    """Load a run from a checkpoint. To be called on every rank.

    The file is checked before anything of it is interpreted, and loading runs no code from it. What it was saved
    without (`save_ignore_keys`) stays as it is in `state`, with a warning.

    Args:
        path: A local path or a URI; may hold `{run_name}`, and `{rank}` for runs whose first rank wrote.
        state: Takes what is loaded.
        logger: For algorithms that have to be applied first.
        object_store: Where `path` is: an object store, or a logger that keeps files.
        load_weights_only: Load the model only; time, optimizer and everything else stay.
        strict_model_weights: Whether the model's keys must match those of the file exactly. Those that `ignore_keys`
            leaves out need not.
        progress_bar: Show the progress of a download.
        ignore_keys: What not to load; see `glob_filter`.
        exclude_algorithms: Class names of algorithms that are not to be applied although the saved run had them.
        algorithm_passes: Passes that order the algorithms.

    Returns:
        The states of the random generators, one dict per rank; None if there are none or only weights are loaded.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: The file is torn, truncated or altered.
        UnsafeCheckpointError: It holds types whose loading could run code.
        ValueError: It lacks the model, the time or the optimizers, and they were not left out on purpose.
        RuntimeError: The model's keys do not match, or ranks loaded different files.
    """
    return restore(
        path,
        state,
        logger,
        object_store,
        load_weights_only,
        strict_model_weights,
        progress_bar,
        ignore_keys,
        exclude_algorithms,
        algorithm_passes,
    )


def restore(
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
    divide: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]] | None:
    """`load_checkpoint` for a model that may still have to be divided among ranks.

    `divide` does that. It is called once, when the algorithms that the saved run needed have changed the model. All
    other arguments are as there.
    """
    with _opened(path, state.run_name, object_store, progress_bar) as content:
        left_out = content.pop(LEFT_OUT, [])
        check_complete(os.fspath(path), content, left_out, state, load_weights_only)
        before = _keys(content, "model")
        apply_filter(ignore_keys, content)
        ignored = before - _keys(content, "model")
        drop(content, left_out)
        if load_weights_only:
            content.get("state", {}).pop("optimizers", None)
        if "model" in content.get("state", {}):
            add_required_algorithms(
                state, upgrade_state_dict(content["state"]), logger, exclude_algorithms, algorithm_passes
            )
        divide()
        _divide(content, state)
    warn_of(os.fspath(path), left_out)
    unknown, saved = _keep_own(state, content, ignored), content.get("state")
    if saved is None:
        log.info("Nothing is loaded from %s: all of it is left out.", path)
        return None
    fill(state, saved, left_out)
    strict = strict_model_weights and not unknown
    if load_weights_only:
        if "model" in saved:
            state.load_model_state(saved, logger, strict, exclude_algorithms, algorithm_passes)
        return None
    content[LEFT_OUT] = left_out
    part = attached(state)
    if part is not None:
        part.before_load(content)
    state.load_state_dict(saved, logger, strict, exclude_algorithms, algorithm_passes)
    if part is not None:
        part.after_load(content)
    _check_ranks_agree(state)
    rng: list[dict[str, Any]] | None = content.get("rng")
    return rng


@contextmanager
def _opened(path: str | os.PathLike[str], run_name: str, object_store: Any, progress_bar: bool) -> Iterator[Any]:
    """Fetch, check and read a checkpoint: `{"state": ..., "rng": [...], "resumption": ...}`, as far as it has them.

    Its shards, if it has any, can be read inside.
    """
    # Only the first rank wrote, whichever rank is reading.
    given = os.fspath(path) if object_store is not None else os.path.expanduser(path)
    name = partial_format(given, run_name=run_name, rank=0, local_rank=0, node_rank=0)
    with _local(name, object_store, progress_bar) as file:
        _validate(file)
        if file.is_dir() and not is_sharded_run(file):
            raise CorruptCheckpointError(file, f"it is a folder that lacks {STATES!r}, which is written last")
        if file.exists() and not (file.is_dir() or file.is_file()):  # reading a pipe would wait for ever
            raise CorruptCheckpointError(file, "it is no regular file")
        content, saved_as = read_run(file) if is_sharded_run(file) else read_file(file)
        actual = os.path.basename(name) if object_store is not None or is_uri(name) else file.resolve().name
        if saved_as is not None and was_swapped(saved_as, actual):
            warnings.warn(
                f"The checkpoint {name!r} was saved as {saved_as!r}: it was copied over another one. It is intact, and "
                f"is loaded.",
                stacklevel=5,
            )
        if not isinstance(content, dict) or not ({"state", "rng"} & content.keys()):
            raise ValueError(
                f"{name!r} is no checkpoint of a run: it lacks the entry 'state'. Load the weights of a model with "
                f"`model.load_state_dict(torch.load(...))`."
            )
        yield content


def download_checkpoint(
    path: str, node_checkpoint_folder: str, object_store: Any = None, progress_bar: bool = True
) -> tuple[str, None, bool]:
    """Bring a checkpoint to a folder of this node.

    Args:
        path: A local path or a URI.
        node_checkpoint_folder: The folder.
        object_store: An object store, or a logger that keeps files.
        progress_bar: Show the progress.

    Returns:
        The path of the file, and two values (None, False) that are there for programs that expect three.
    """
    from composer.checkpoint._get_file import get_file

    file = os.path.join(node_checkpoint_folder, os.path.basename(path))
    get_file(path, file, object_store, progress_bar=progress_bar)
    return file, None, False


@contextmanager
def _local(name: str, object_store: Any, progress_bar: bool) -> Iterator[Path]:
    """The file on this node; the first process of each node fetches it for the others."""
    if object_store is None and not is_uri(name):
        yield Path(name)
        return
    with on_each_node(lambda folder: _download(name, folder, object_store, progress_bar)) as folder:
        yield folder / os.path.basename(name)


def _download(name: str, folder: Path, object_store: Any, progress_bar: bool) -> None:
    if object_store is None and download_run(name, folder / os.path.basename(name), progress_bar):
        return
    download_checkpoint(name, str(folder), object_store, progress_bar)


def _validate(file: Path) -> None:
    """Ask the function that `CHECKPOINT_VALIDATION_FUNCTION` names, if it does, whether a file may be loaded."""
    function = os.environ.get(VALIDATION_VARIABLE)
    if function is None:
        return
    module, _, attribute = function.rpartition(".")
    if not import_object(f"{module}:{attribute}")(str(file)):
        raise ValueError(f"`{function}`, which {VALIDATION_VARIABLE} names, refuses the checkpoint {str(file)!r}.")


def _divide(content: dict[str, Any], state: State) -> None:
    """Of what belongs to parameters that are divided among ranks, keep or read this rank's part."""
    named = unwrapped_model(state.model).named_parameters(remove_duplicate=False)  # tied weights have all their names
    own = {name: parameter for name, parameter in named if is_sharded(parameter)}
    parameters = {**own, **{f"module.{name}": p for name, p in own.items()}}  # in files of DDP
    saved = content.get("state") or {}
    if parameters:
        saved.update({part: sharded_as(saved[part], parameters) for part in _DIVIDED if part in saved})
    content.update(fill_shards(content, parameters))


def _keys(content: dict[str, Any], part: str) -> set[str]:
    return set((content.get("state") or {}).get(part) or {})


def _keep_own(state: State, content: dict[str, Any], ignored: set[str]) -> set[str]:
    """Put the model's own values in the place of those left out; those that it does not have (yet) are returned."""
    if not ignored:
        return ignored
    own = state.get_model_state_dict()
    content.get("state", {}).get("model", {}).update({key: own[key] for key in ignored & own.keys()})
    return ignored - own.keys()


def _check_ranks_agree(state: State) -> None:
    batches = dist.all_gather_object(state.timestamp.batch.value)
    if len(set(batches)) > 1:
        raise RuntimeError(
            f"The ranks loaded checkpoints of different batches: {batches}. Give all of them the same file."
        )
