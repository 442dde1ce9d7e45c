"""Loading the parts of a checkpoint that `composer.checkpoint.save` wrote, into any training loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer.checkpoint.file import read_file
from composer.checkpoint.ranks import on_each_node
from composer.checkpoint.safe_load import CorruptCheckpointError, UnsafeCheckpointError, load_pickle
from composer.checkpoint.safetensors import read_tensors
from composer.checkpoint.save import METADATA_NAME, optimizer_folders
from composer.checkpoint.selection import Keys, Precision, check_keys, check_precision, converted, selected
from composer.checkpoint.sharded_tensors import is_sharded
from composer.checkpoint.shards import INDEX, is_shard_folder, read_index, read_shards
from composer.checkpoint.state_dict import get_model_state_dict, get_optim_state_dict
from composer.checkpoint.storage import storage_of
from composer.core import State
from composer.utils import is_model_fsdp, is_uri, reproducibility, unwrapped_model

Path_ = str | os.PathLike[str]
_SUFFIXES = ("pt", "safetensors")


@dataclass
class CheckpointLoadOptions:
    """Options for loading a checkpoint.

    Args:
        load_model: Load the model.
        load_optimizer: Load the optimizer.
        load_resumption_state: Load the rest of the run.
        include_keys: Patterns of the names of parameters and buffers to load; None: all.
        ignore_keys: Patterns of names not to load.
        sharded_checkpoint: True if the checkpoint is in shards. The model may be sharded by FSDP or not.
        shard_as_needed_during_load: Must be False: shard the model before.
        strict: True if the file must have exactly the names that are to be loaded.
        precision: What the file's floating tensors are converted to before they are copied into the model, whose own
            precision stays; None: they are copied as they are.
        cpu_offload: Gather shards in host memory instead of on the device; a single file is always read into it.
        load_planner: A planner of `torch.distributed.checkpoint`; of checkpoints in shards only.
        fsdp_config: Must be None, as `shard_as_needed_during_load` is False.
        device_mesh: Must be None, likewise.
        seed: Must be 42, likewise: it would seed what sharding initializes.

    Raises:
        ValueError: An argument is invalid.
    """

    load_model: bool = True
    load_optimizer: bool = False
    load_resumption_state: bool = False
    include_keys: Keys | None = None
    ignore_keys: Keys | None = None
    sharded_checkpoint: bool = False
    shard_as_needed_during_load: bool = False
    strict: bool = True
    precision: Precision | None = "fp32"
    cpu_offload: bool = True
    load_planner: Any = None
    fsdp_config: Any = None
    device_mesh: Any = None
    seed: int = 42

    def __post_init__(self) -> None:
        check_keys(self.include_keys, self.ignore_keys)
        check_precision(self.precision)
        for name, default in {
            "shard_as_needed_during_load": False, "fsdp_config": None, "device_mesh": None, "seed": 42
        }.items():  # fmt: skip
            if getattr(self, name) != default:
                raise ValueError(
                    f"`{name}` must be {default}: `load_checkpoint` does not shard the model. Shard it with "
                    f"`torch.distributed.fsdp.fully_shard`, which takes a mesh, and then load into its shards."
                )
        if self.load_planner is not None and not self.sharded_checkpoint:
            raise ValueError("`load_planner` has no effect without `sharded_checkpoint=True`. Remove one of the two.")


def load_checkpoint(
    load_path: Path_,
    load_options: CheckpointLoadOptions | None = None,
    model: torch.nn.Module | None = None,
    optim: torch.optim.Optimizer | None = None,
    state: State | None = None,
    model_child_path: str | None = None,
    optim_child_path: str | None = None,
    resumption_filename: str = "resumption.pkl",
) -> None:
    """Load a checkpoint that `save_checkpoint_to_disk` wrote. Call it on every rank.

    For the checkpoints of a Trainer, there is `composer.checkpoint.load_checkpoint`.

    Args:
        load_path: Its folder, or the URI of its folder.
        load_options: What to load, and how; by default the model, and the optimizer if `optim` is given.
        model: The model to load into; that of `state` by default.
        optim: The optimizer to load into; by default, the optimizers of `state`.
        state: The run to load the rest into.
        model_child_path: The path of the model in the folder; `model` by default.
        optim_child_path: The path of the optimizer in the folder; `optim` by default. That of a second optimizer has a
            2 at the end, and so on.
        resumption_filename: The name of the file with the rest.

    Raises:
        ValueError: The object that a part is to be loaded into is missing.
        FileNotFoundError: There is no such checkpoint, or it has no such part.
        CorruptCheckpointError: It is incomplete, or a file of it is incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.
        RuntimeError: The names or shapes do not match.
    """
    options = CheckpointLoadOptions(load_optimizer=optim is not None) if load_options is None else load_options
    optimizers = [] if optim is None else [optim]
    if state is not None:
        model = state.model if model is None else model
        optimizers = optimizers or list(state.optimizers)
    needed = {
        "`load_model=True` needs `model` or `state`": options.load_model and model is None,
        "`load_optimizer=True` needs `model` or `state`": options.load_optimizer and model is None,
        "`load_optimizer=True` needs `optim`, or a `state` with an optimizer": options.load_optimizer
        and not optimizers,
        "`load_resumption_state=True` needs `state`": options.load_resumption_state and state is None,
    }
    for text, is_missing in needed.items():
        if is_missing:
            raise ValueError(f"{text}. Pass it, or set the option to False.")
    model_folder = model_child_path or "model"
    folders = optimizer_folders(optim_child_path or "optim", len(optimizers))
    with _local_folder(os.fspath(load_path), [model_folder, *folders], resumption_filename) as folder:
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {str(folder)!r} of a checkpoint.")
        if not (folder / METADATA_NAME).is_file():
            raise CorruptCheckpointError(os.fspath(load_path), f"it lacks {METADATA_NAME!r}, which is written last")
        if options.load_model:
            assert model is not None
            load_model_checkpoint(model, folder / model_folder, options)
        if options.load_resumption_state:  # first, because algorithms may wrap the optimizer
            assert state is not None
            load_resumption_checkpoint(state, folder / resumption_filename)
        if options.load_optimizer:
            assert model is not None
            for each, name in zip(optimizers, folders, strict=True):
                load_optim_checkpoint(model, each, folder / name, options)


def load_model_checkpoint(
    model: torch.nn.Module, load_path: Path_, load_options: CheckpointLoadOptions | None = None
) -> None:
    """Load a model that `save_model_to_disk` wrote. Call it on every rank.

    Args:
        model: The model to load into; wrapped or not.
        load_path: The file, its folder, or the folder of the shards.
        load_options: Options; `load_model` and the like are ignored.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        ValueError: The model is in shards although `sharded_checkpoint` is False, or the reverse.
        RuntimeError: Names do not match, and `strict`; or shapes do not.
    """
    options = CheckpointLoadOptions() if load_options is None else load_options
    module = unwrapped_model(model)
    path = _part(Path(load_path).expanduser(), "model", options.sharded_checkpoint)
    if options.sharded_checkpoint:
        loaded = _model_of_shards(module, path, options)
    else:
        content = read_tensors(path)[0] if path.suffix == ".safetensors" else read_file(path)
        own = module.state_dict()
        requested = selected(dict.fromkeys([*own, *content]), options.include_keys, options.ignore_keys)
        loaded = {name: content[name] for name in requested if name in content}
        missing = {name for name in requested if name not in content}
        _check_names(module, path, missing, loaded.keys() - own.keys(), options.strict)
    dtype = check_precision(options.precision)
    loaded = {name: converted(value, dtype) for name, value in loaded.items()}
    if not is_model_fsdp(module):
        module.load_state_dict(loaded, strict=False)  # the names have been checked
        return
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    full = not any(map(is_sharded, loaded.values()))
    set_options = torch_state_dict.StateDictOptions(full_state_dict=full, strict=False)
    torch_state_dict.set_model_state_dict(module, loaded, options=set_options)


def load_optim_checkpoint(
    model: torch.nn.Module,
    optim: torch.optim.Optimizer,
    load_path: Path_,
    load_options: CheckpointLoadOptions | None = None,
) -> None:
    """Load an optimizer that `save_optim_to_disk` wrote. Call it on every rank.

    As in torch, its tensors get the precision of their parameters.

    Args:
        model: The model whose parameters the optimizer has.
        optim: The optimizer to load into.
        load_path: The file, its folder, or the folder of the shards.
        load_options: Options. Parameters that they leave out keep their state; so do those that the file lacks, unless
            `strict`. Shards are always loaded completely.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        ValueError: The parameter groups differ; or it is in shards although `sharded_checkpoint` is False, or the
            reverse; or a selection of shards is requested.
        KeyError: `strict`, and the file holds other parameters.
    """
    options = CheckpointLoadOptions() if load_options is None else load_options
    module = unwrapped_model(model)
    path = _part(Path(load_path).expanduser(), "optim", options.sharded_checkpoint)
    sharded = is_model_fsdp(module)
    if (options.sharded_checkpoint or sharded) and (options.include_keys, options.ignore_keys) != (None, None):
        what = "an optimizer in shards" if options.sharded_checkpoint else "the optimizer of a sharded model"
        raise ValueError(
            f"`include_keys` and `ignore_keys` must be None for {what}, which is always loaded completely. Load the "
            f"model with them, and the optimizer without."
        )
    if not options.sharded_checkpoint and not sharded:
        loaded = _merged(read_file(path), get_optim_state_dict(module, optim, precision=None), options)
        state = State(model=module, optimizers=optim)
        (name,) = state.get_optim_state_dict()
        state.load_optim_state({"optimizers": {name: loaded}}, options.strict)
        return
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    if options.sharded_checkpoint:
        # The tensors to fill, also of an optimizer that has not taken a step.
        get_options = torch_state_dict.StateDictOptions(cpu_offload=options.cpu_offload and sharded)
        loaded = dict(torch_state_dict.get_optimizer_state_dict(module, optim, options=get_options))
        read_shards(loaded, path, options.load_planner)
    else:
        loaded = read_file(path)
    set_options = torch_state_dict.StateDictOptions(
        full_state_dict=not options.sharded_checkpoint, strict=options.strict
    )
    torch_state_dict.set_optimizer_state_dict(module, optim, loaded, options=set_options)


def load_resumption_checkpoint(state: State, load_path: Path_) -> None:
    """Load the state that `save_resumption_state_to_disk` wrote, running no code from it. Call it on every rank.

    The random generators are restored immediately, unless `state.resumption` is set, as by the Trainer, which restores
    them when training continues.

    Args:
        state: The run to load into.
        load_path: The file, or the folder of `resumption.pkl`.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.
    """
    path = Path(load_path).expanduser()
    saved = read_resumption(path / "resumption.pkl" if path.is_dir() else path)
    content: dict[str, Any] = {"state": saved}
    for key in ("rng", "resumption"):
        if key in saved:
            content[key] = saved.pop(key)
    part = state.resumption
    if part is not None:
        part.before_load(content)
    state.load_state_dict(saved)
    if part is not None:
        part.after_load(content)
    elif "rng" in content:
        reproducibility.load_rng_state(content["rng"])


def read_resumption(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that `save_resumption_state_to_disk` wrote, or a plain pickle, as the reference writes."""
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"There is no file {str(file)!r}.")
    with open(file, "rb") as opened:
        start = opened.read(4)
    try:
        content = read_file(file) if start == b"PK\x03\x04" else load_pickle(file.read_bytes(), str(file))
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{error} (global not in allowlist)", error.types) from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(file, f"it must hold a dictionary, but holds {type(content).__name__}")
    return content


@contextmanager
def _local_folder(load_path: str, parts: list[str], file: str) -> Iterator[Path]:
    """Yield the local folder of a checkpoint; a remote one is downloaded first, once per node."""
    if not is_uri(load_path):
        yield Path(load_path).expanduser()
        return

    def fetch(folder: Path) -> None:
        root, folders = storage_of(load_path), [part.strip("/") for part in parts]
        for name in root.find():
            if name in (METADATA_NAME, file) or name.rpartition("/")[0] in folders:
                root.download(name, folder / name)

    with on_each_node(fetch) as folder:
        yield folder


def _part(path: Path, stem: str, sharded: bool) -> Path:
    """Return the file of a part, or the folder of its shards."""
    shards = is_shard_folder(path)
    files = [path / f"{stem}.{suffix}" for suffix in _SUFFIXES] if path.is_dir() else [path]
    file = next((one for one in files if one.is_file()), None)
    if not shards and file is None:
        raise FileNotFoundError(f"There is neither a file of the {stem} nor shards of it in {str(path)!r}.")
    if sharded != shards:
        raise ValueError(
            f"`sharded_checkpoint` must be {shards} for {str(path)!r}, which is {'' if shards else 'not '}in shards."
        )
    return path if file is None or shards else file


def _model_of_shards(module: torch.nn.Module, path: Path, options: CheckpointLoadOptions) -> dict[str, Any]:
    """Read the selected tensors of a checkpoint in shards; they are sharded if the model is."""
    own = get_model_state_dict(module, is_model_fsdp(module), None, cpu_offload=options.cpu_offload)
    if options.load_planner is not None:  # it decides what the names mean
        loaded = {name: own[name].clone() for name in selected(own, options.include_keys, options.ignore_keys)}
    else:
        saved = read_index(path / INDEX).state_dict_metadata.keys()
        requested = selected(dict.fromkeys([*own, *saved]), options.include_keys, options.ignore_keys)
        loaded = {name: own[name].clone() for name in requested if name in saved and name in own}
        missing, unexpected = {*requested} & own.keys() - saved, {*requested} & saved - own.keys()
        _check_names(module, path, missing, unexpected, options.strict)
    read_shards(loaded, path, options.load_planner)
    return loaded


def _check_names(
    module: torch.nn.Module, path: str | os.PathLike[str], missing: set[str], unexpected: set[str], strict: bool
) -> None:
    """Raise for names that do not match, or warn if not `strict`.

    Raises:
        RuntimeError: Names do not match, and `strict`.
    """
    if not missing and not unexpected:
        return
    text = f"missing in {os.fspath(path)!r}: {sorted(missing)}; unknown to the model: {sorted(unexpected)}"
    if strict:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: {text}. Pass `strict=False` to load what "
            f"matches, or select names with `include_keys` or `ignore_keys`."
        )
    warnings.warn(f"The saved model does not match this one: {text}.", stacklevel=4)


def _merged(saved: dict[str, Any], own: dict[str, Any], options: CheckpointLoadOptions) -> dict[str, Any]:
    """Return the saved state of the selected parameters, and the current state of the others.

    Raises:
        KeyError: `strict`, and the file lacks a selected parameter.
    """
    # A state without these keys has a format of its own, which cannot be merged.
    if not all({"state", "param_groups"} <= state.keys() for state in (own, saved)):
        return saved
    here, there = ({name for group in state["param_groups"] for name in group["params"]} for state in (own, saved))
    if not all(isinstance(name, str) for name in there):  # numbered, as in torch
        return saved
    requested = {*selected(sorted(here | there), options.include_keys, options.ignore_keys)}
    if options.strict and (differing := (here ^ there) & requested):
        raise KeyError(
            f"The saved optimizer and this one hold different parameters: {sorted(differing)}. Build it from the same "
            f"parameters, or pass `strict=False` to load those that both have."
        )
    states = {name: value for name, value in own["state"].items() if name not in requested & there}
    states |= {name: value for name, value in saved["state"].items() if name in requested}
    groups = saved["param_groups"]
    if (options.include_keys, options.ignore_keys) != (None, None):
        pairs = zip(groups, own["param_groups"], strict=False)
        groups = [{**group, "params": other["params"]} for group, other in pairs]
    return {**saved, "state": states, "param_groups": groups}
