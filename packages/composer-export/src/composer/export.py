"""Take trained weights home: into the model without the layers of our methods, or back into the same ones.

A layer that a method has changed says itself what its weights are in the model before the change, with a method or an
attribute `composer_plain_state`; see `plain_state_dict`. Nothing here knows a method by name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from composer.checkpoint import read_checkpoint
from composer.core import Algorithm, Engine, Event, Precision, State
from composer.inference.export import check_exportable
from composer.utils import ensure_tuple
from composer.utils.module_surgery import list_modules

__all__ = ["plain_state_dict", "restore"]


@torch.no_grad()
def plain_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a trained model for the model that its own code builds, without our layers.

    Names are those of that model, and what can be folded into its weights is: `plain.load_state_dict(..., strict=True)`
    then gives a model with the same outputs in evaluation mode, up to rounding. Pass the part whose names are wanted:
    for `ComposerClassifier(net)` that is `model.module`, for `HuggingFaceModel(net)` `model.model`.

    A changed layer takes part with `composer_plain_state(state) -> state`, a method or an attribute: it gets the
    weights of its own, by their names in the layer, after its children have been folded, and returns those of the layer
    that it replaced. It raises `ValueError` with the reason if no such weights compute the same.

    Args:
        model: The model, possibly wrapped by DDP or `torch.compile`; it is not changed.

    Returns:
        Copies by name, on the device of the model.

    Raises:
        ValueError: Layers have no counterpart in the plain model; all of them are listed with the reasons. Or weights
            are shared under several names, of which only some can be folded; or the model is sharded, or on the meta
            device.
        TypeError: `model` is not a module.

    Example:
        >>> from composer import functional as cf
        >>> conv, plain = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(3, 8, 3)
        >>> cf.apply_weight_standardization(conv)
        1
        >>> plain.load_state_dict(plain_state_dict(conv))
        <All keys matched successfully>
        >>> bool(plain.weight.mean().abs() < 1e-6)
        True
    """
    inner = check_exportable(model)
    weights: dict[str, Any] = dict(inner.state_dict())  # a module's own `get_extra_state` may return anything
    shared: dict[Any, list[str]] = {}
    for key, value in weights.items():
        if isinstance(value, torch.Tensor) and value.numel():
            shared.setdefault((value.data_ptr(), value.shape, value.dtype), []).append(key)
    modules = dict(inner.named_modules(remove_duplicate=False))
    refusals: dict[torch.nn.Module, str] = {}
    for name in reversed(modules):  # children come before the layers that hold them
        fold: Any = getattr(modules[name], "composer_plain_state", None)
        if fold is None:
            continue
        prefix = f"{name}." if name else ""
        own = {key.removeprefix(prefix): weights.pop(key) for key in list(weights) if key.startswith(prefix)}
        try:
            own = fold(own)
        except ValueError as error:
            refusals[modules[name]] = str(error)
        weights |= {f"{prefix}{key}": value for key, value in own.items()}
    if refusals:
        raise ValueError(
            f"No weights of the plain model compute the same:{list_modules(inner, refusals)}\nBuild the model and call "
            f"`composer.export.restore(model, checkpoint)`, or write weights and code to one file that needs neither: "
            f"`composer.inference.export_for_inference`."
        )
    for keys in shared.values():
        left = [weights[key] for key in keys if key in weights]
        if left and (len(left) < len(keys) or not all(torch.equal(left[0], each) for each in left[1:])):
            raise ValueError(
                f"The weights {', '.join(keys)} are one tensor, also in the plain model, whose layers would each need "
                f"another one. Build the model and call `composer.export.restore(model, checkpoint)`."
            )
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in weights.items()}
    return {key.replace("_orig_mod.", ""): value for key, value in copies.items()}  # of parts compiled by themselves


def restore(
    model: torch.nn.Module, file: str | os.PathLike[str], algorithms: Algorithm | Sequence[Algorithm] = ()
) -> torch.nn.Module:
    """Change the layers of a newly built model as in the run that saved a checkpoint, and load its weights.

    The checkpoint lists the algorithms of its run with their arguments; those that a model cannot be loaded without are
    applied again, in their order. They are rebuilt by parsing text, and no code of the file runs.

    Args:
        model: The model as its own code builds it, with the names in the file: for a run of `ComposerClassifier(net)`
            such a classifier. It is changed in place.
        file: The path or URI of a checkpoint of the Trainer or of `composer.checkpoint.save_checkpoint`; or of
            Lightning with `ComposeCallback`.
        algorithms: Algorithms that the file does not list or whose arguments cannot be saved, such as functions; they
            are applied first. A file with nothing but weights lists none, and shows no setting that is not a tensor,
            such as `blur_first` or a drop rate: pass the arguments of the run, which cannot be checked.

    Returns:
        The model, in training mode if it was.

    Raises:
        FileNotFoundError: There is no such file.
        CorruptCheckpointError: It is incomplete or modified.
        UnsafeCheckpointError: It holds types whose loading could run code.
        ModuleNotFoundError: The package of an algorithm is not installed.
        ValueError: The file has no weights, or an algorithm cannot be applied to the model.
        RuntimeError: The names or shapes of the weights are not those of the changed model.

    Warns:
        UserWarning: An algorithm is listed with other arguments than it is passed with.

    Example:
        >>> from tempfile import NamedTemporaryFile
        >>> from composer import functional as cf
        >>> from composer.algorithms import SqueezeExcite
        >>> trained = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3))
        >>> cf.apply_squeeze_excite(trained, latent_channels=2, min_channels=4)
        >>> with NamedTemporaryFile(suffix=".pt") as file:
        ...     torch.save(trained.state_dict(), file.name)
        ...     restored = restore(
        ...         torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3)), file.name, SqueezeExcite(2, min_channels=4)
        ...     )
        >>> images = torch.randn(2, 4, 8, 8)
        >>> torch.equal(restored(images), trained(images))
        True
    """
    saved = _read(file)
    metadata = saved.get("metadata")
    state = State(
        model=model,
        max_duration="1ep",
        rank_zero_seed=0,
        algorithms=ensure_tuple(algorithms),
        # Some algorithms act in a lower precision only.
        precision=(metadata.get("precision") if isinstance(metadata, dict) else None) or Precision.FP32,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # surgery may draw random numbers
        warnings.filterwarnings("ignore", "Automatically adding required_on_load", UserWarning)
        Engine(state).run_event(Event.INIT)
        try:
            state.load_model_state(saved, strict=True)
        except RuntimeError as error:
            if saved.get("algorithms") or state.algorithms:
                raise
            raise RuntimeError(
                f"{error}\nThe file does not list algorithms. If some have changed the layers of the saved model, pass "
                f"them as `algorithms`, with their arguments."
            ) from error
    listed = saved.get("algorithms")
    states = dict(listed) if isinstance(listed, list) else {}
    for algorithm in state.algorithms:
        if type(algorithm).__qualname__ in states:
            algorithm.load_state_dict(states[type(algorithm).__qualname__])  # such as a drop rate that was still rising
    return state.model


def _read(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the entries `model`, `algorithms` and others of the state in a checkpoint."""
    content = read_checkpoint(file, ("model", "algorithms", "metadata", "is_model_ddp", "_is_model_ddp_wrapped"))
    content = content if isinstance(content, dict) else {}
    saved: dict[str, Any] = content.get("state", {"model": content})
    if "state_dict" in content:  # of Lightning, with the state of `ComposeCallback`
        saved = {"model": content["state_dict"], "algorithms": content.get("composer", {}).get("algorithms")}
    weights = saved.get("model")
    if not (isinstance(weights, dict) and any(isinstance(each, torch.Tensor) for each in weights.values())):
        raise ValueError(
            f"`file` must be a checkpoint of composer or of Lightning, or tensors by name, got {os.fspath(file)!r} "
            f"with {', '.join(map(repr, list(content)[:10])) or 'nothing'}. Save the weights alone."
        )
    return saved
