"""The functions, the layer, then the algorithm. Symbols: patches P of d = C * kh * kw values, filters F of (d, d).

The eigenvalues of the second moment of the patches are lam, its eigenvectors the columns of V.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import DataLoader, IterableDataset

from composer.algorithms.utils.weight_swaps import has_passed
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    CHANGES_LAYERS,
    FACTORIZES_WEIGHTS,
    FREEZES_WEIGHTS,
    REPLACES_BLOCKS,
    REPLACES_CONVS,
    STANDARDIZES_WEIGHTS,
    WRAPS_CONVS,
    Algorithm,
    Event,
    Placement,
    Time,
)
from composer.utils import check_finite, check_integers, dist, module_surgery, plain_number
from composer.utils.batch_helpers import batch_get
from composer.utils.reproducibility import seed_context

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

Images = torch.Tensor | Iterable[torch.Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_CHUNK = 2**23  # values of patches that are in memory at a time
_READ = 256  # images that are read at a time


@torch.no_grad()
def compute_whitening_filters(
    images: Images,
    kernel_size: int | tuple[int, int] = 2,
    eps: float = 5e-4,
    *,
    dilation: int | tuple[int, int] = 1,
) -> torch.Tensor:
    """Return filters that whiten the patches of images, each with both signs.

    With the patches P of n positions, one per row: P^T P / n = V diag(lam) V^T, F = diag(lam + eps)^(-1/2) V^T, and the
    filters are F and -F. The outputs of F then have the second moment diag(lam / (lam + eps)). The mean of the patches
    is not subtracted.

    Args:
        images: Floating, shape (N, C, H, W), as the model sees them; or an iterable of such, to hold fewer in memory.
        kernel_size: The height kh and width kw of the patches.
        eps: Added to the eigenvalues, at least 0: it limits the gain of rare directions.
        dilation: The distance between the pixels of a patch.

    Returns:
        Shape (2 * C * kh * kw, C, kh, kw), float64, on the device of the images: first F, by falling eigenvalues, then
        -F.

    Raises:
        ValueError: `eps` is negative, there are no patches, or the images do not have four dimensions.
        TypeError: The images are not floating.

    Example:
        >>> images = torch.randn(64, 3, 8, 8)
        >>> filters = compute_whitening_filters(images, eps=0.0)
        >>> outputs = torch.nn.functional.conv2d(images.double(), filters)[:, :12].movedim(1, -1).flatten(0, 2)
        >>> torch.allclose(outputs.T @ outputs / len(outputs), torch.eye(12, dtype=torch.float64))
        True

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.2.
    Differs: computed in float64.
    """
    check_finite("It is added to eigenvalues.", eps=eps, least=0)
    kernel, spread = _pair(kernel_size), _pair(dilation)
    moment: torch.Tensor | None = None
    count, channels = 0, 0
    for part in [images] if isinstance(images, torch.Tensor) else images:
        _check_images(part)
        channels = part.shape[1]
        values_of_image = channels * kernel[0] * kernel[1] * part.shape[2] * part.shape[3]
        for chunk in part.split(max(1, _CHUNK // max(values_of_image, 1))):
            patches = F.unfold(chunk.double(), kernel, spread).movedim(1, -1).flatten(0, 1)
            product = patches.T @ patches
            moment = product if moment is None else moment + product
            count += len(patches)
    if moment is None or not count:
        raise ValueError("There must be at least one image, and it must not be smaller than a patch. Pass more images.")
    # A matrix this small is decomposed fastest on the host; and the same way on every device.
    eigenvalues, vectors = torch.linalg.eigh((moment / count).cpu())
    scaled = (vectors / (eigenvalues.clamp(min=0) + eps).sqrt()).T.flip(0)
    filters = scaled.reshape(-1, channels, *kernel).to(moment.device)
    return torch.cat([filters, -filters])


class WhiteningConv2d(nn.Conv2d):
    """A convolution with frozen filters that whiten the input, and a bias.

    Made from a convolution by `apply_whitening`, with its settings and the same parameters. Checkpoints have the same
    names and shapes as with the convolution, and the bias.

    Args:
        conv: The convolution. Its weight is frozen; if it has no bias, the layer gets one of zeros.

    Attributes:
        is_whitened: True if the filters were computed from images, or loaded.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, conv: nn.Conv2d) -> None:
        nn.Module.__init__(self)  # the parameters are those of `conv`
        settings = {name: value for name, value in vars(conv).items() if name not in vars(self)}
        vars(self).update(settings)
        self.register_parameter("weight", _parameter(conv.weight))
        self.weight.requires_grad_(False)
        self.weight.grad = None
        zeros = torch.zeros(conv.out_channels, dtype=conv.weight.dtype, device=conv.weight.device)
        self.register_parameter("bias", _parameter(zeros if conv.bias is None else conv.bias))
        self.is_whitened = False

    @torch.no_grad()
    def set_filters(self, filters: torch.Tensor) -> None:
        """Set the weight to filters of `compute_whitening_filters`, and the bias to zeros."""
        if hasattr(self.weight, "to_local"):
            raise RuntimeError(
                "`Whitening` must have images before the model is sharded. Pass `train_dataloader` to the `Trainer` "
                "instead of `fit`, or call `apply_whitening` before."
            )
        self.weight.copy_(filters)
        self.bias.zero_()
        self.is_whitened = True

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.is_whitened = self.is_whitened or f"{prefix}weight" in state_dict


def apply_whitening(
    model: nn.Module,
    images: Images,
    eps: float = 5e-4,
    *,
    layer_name: str | None = None,
    optimizers: Optimizers | None = None,
) -> None:
    """Let the first convolution of a model whiten its input, in place; its filters are frozen.

    The convolution becomes a `WhiteningConv2d` with the filters of `compute_whitening_filters`, and a bias of zeros,
    which trains. It must have 2 * C * kh * kw outputs, two per value of a patch: 24 for a kernel of 2 x 2 and 3
    channels.

    Args:
        model: The model.
        images: Floating, shape (N, C, H, W), as the model sees them: normalized; or an iterable of such.
        eps: Added to the eigenvalues, at least 0.
        layer_name: The name of the convolution in `model.named_modules()`. None: the first one.
        optimizers: The optimizers of the model, from which the filters are removed, and which get a new bias. Required
            unless they are created afterwards, from `[p for p in model.parameters() if p.requires_grad]`.

    Raises:
        ValueError: The convolution has another number of outputs or groups, there is no layer of that name, the images
            have another number of channels, or an argument is invalid.
        TypeError: The images are not floating, or the layer is not a plain `Conv2d`.

    Warns:
        NoEffectWarning: The model has no `Conv2d`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 24, kernel_size=2), nn.GELU())
        >>> apply_whitening(model, torch.randn(64, 3, 8, 8))
        >>> model[0].weight.requires_grad, model[0].bias.requires_grad
        (False, True)

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.2.
    Differs: the layer may have another kernel size or number of channels.
    """
    check_finite("It is added to eigenvalues.", eps=eps, least=0)
    layer = _prepare_layer(model, layer_name, optimizers)
    if layer is None:
        warn_no_effect("`apply_whitening` changed nothing: the model has no `Conv2d`.")
    else:
        layer.set_filters(_filters_for(layer, images, eps))


def _prepare_layer(model: nn.Module, layer_name: str | None, optimizers: Optimizers | None) -> WhiteningConv2d | None:
    """Return the layer for the filters, after replacing the convolution if that was not done yet."""
    layer = _layer_of(model)
    if layer is None:
        conv = _find_conv(model, layer_name)
        if conv is None:
            return None
        _check_conv(conv)
        made = WhiteningConv2d(conv)
        module_surgery.replace_module_classes(
            model, {nn.Conv2d: lambda module, index: made if module is conv else None}, optimizers=optimizers
        )
        layer = made
    if optimizers:
        module_surgery.update_params_in_optimizer([layer.weight], [], optimizers)
    return layer


def _layer_of(model: nn.Module) -> WhiteningConv2d | None:
    return next((module for module in model.modules() if isinstance(module, WhiteningConv2d)), None)


def _find_conv(model: nn.Module, layer_name: str | None) -> nn.Conv2d | None:
    if layer_name is None:
        return next((part for part in model.modules() if isinstance(part, nn.Conv2d) and part is not model), None)
    found = dict(model.named_modules()).get(layer_name)
    if not isinstance(found, nn.Conv2d):
        raise ValueError(
            f"`layer_name` must be the name of a `Conv2d` of the model, got {layer_name!r}. `model.named_modules()` "
            f"has the names; None is the first convolution."
        )
    return found


def _check_conv(conv: nn.Conv2d) -> None:
    if isinstance(conv, LazyModuleMixin) and conv.has_uninitialized_params():
        raise ValueError(
            "The first convolution must have a shape, got a lazy one. Run the model on a batch before whitening."
        )
    if not conv.weight.requires_grad:
        raise ValueError(
            "The first convolution must be trained, but its weights are frozen, and whitening replaces them. Unfreeze "
            "it, or leave `Whitening` out of fine-tuning."
        )
    if type(conv) is not nn.Conv2d:
        raise TypeError(
            f"The convolution to be whitened must be a plain `torch.nn.Conv2d`, got {type(conv).__name__}. Pass the "
            f"name of a plain one as `layer_name`."
        )
    needed = 2 * conv.in_channels * conv.kernel_size[0] * conv.kernel_size[1]
    if conv.groups != 1 or conv.out_channels != needed:
        raise ValueError(
            f"The convolution to be whitened must have one group and 2 * {conv.in_channels} * {conv.kernel_size[0]} * "
            f"{conv.kernel_size[1]} = {needed} outputs, two per value of a patch, got {conv}. Begin the model with for "
            f"example `Conv2d({conv.in_channels}, {8 * conv.in_channels}, kernel_size=2)`, or pass `layer_name`."
        )


def _filters_for(layer: WhiteningConv2d, images: Images, eps: float) -> torch.Tensor:
    channels = layer.in_channels

    def checked() -> Iterator[torch.Tensor]:
        for part in [images] if isinstance(images, torch.Tensor) else images:
            _check_images(part)
            if part.shape[1] != channels:
                raise ValueError(
                    f"The images must have {channels} channels, as the convolution to be whitened, got shape "
                    f"{tuple(part.shape)}. Pass the images as the model sees them."
                )
            yield part

    kernel: Any = layer.kernel_size
    spread: Any = layer.dilation
    return compute_whitening_filters(checked(), kernel, eps, dilation=spread)


class Whitening(Algorithm):
    """Lets the first convolution decorrelate the pixels, with frozen filters from training images.

    At INIT the first convolution of the model becomes a `WhiteningConv2d`, whose filters do not train; see
    `apply_whitening`. The filters are set from images of the training data at BEFORE_LOAD, or at FIT_START if the
    training loader is given to `fit`, unless they come from a checkpoint. After `bias_duration` the bias is frozen too,
    so the backward pass ends after this layer.

    The images are `num_images` samples at equal distances in the training dataset, with its transforms, collated by
    the loader, before device transforms of a `DataSpec`. Random numbers of the run are not used, and the loader is not
    iterated. A list of batches, and a loader with `state_dict` and `load_state_dict`, are read from the beginning
    instead. With several ranks, the first computes the filters for all.

    Nothing depends on other examples of a batch, so microbatches equal one batch.

    **Events** INIT, BEFORE_LOAD, FIT_START, BATCH_START (bias). **Reads** images of `state.train_dataloader`, or else
    `state.dataloader`. **Writes** a layer of `state.model`; the parameters in `state.optimizers`. **Cost** reading the
    images once, at the start of a run; no gradient of the filters. **Compilation** recompiles once, when the
    bias is frozen.

    **When not to use it** the model is pretrained without it; or the images are normalized on the device, after the
    loader: then call `apply_whitening` with normalized images.

    Args:
        eps: Added to the eigenvalues, at least 0.
        num_images: The number of images, at least 1; all if there are fewer.
        bias_duration: How long the bias of the layer trains, in any unit: "3ep", a `Time`, or None for the whole run.
        layer_name: The name of the convolution in `model.named_modules()`. None: the first one.
        input_key: Position of the images in the batch; see `State.batch_get_item`.

    Raises:
        ValueError: An argument is out of range; at INIT, if the convolution has another number of outputs than 2 * C *
            kh * kw, such as 24 for 3 channels and a kernel of 2 x 2; see `apply_whitening`.
        TypeError: An argument has another type; or the training loader cannot be read without moving its position, or
            its images are not floating.
        RuntimeError: At FIT_START, without a training loader, or if the model is sharded by then.

    Warns:
        NoEffectWarning: At INIT, if the model has no `Conv2d`.

    Example:
        >>> Whitening(bias_duration="2ep")
        Whitening(eps=0.0005,num_images=5000,bias_duration='2ep',layer_name=None,input_key=0)

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.2.
    Differs: the images are spread over the dataset, instead of being its first ones; the layer may have another kernel
        size or number of channels.
    """

    events = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.FIT_START, Event.BATCH_START})
    placement = Placement(
        provides={CHANGES_LAYERS, FREEZES_WEIGHTS},
        after={REPLACES_BLOCKS, REPLACES_CONVS, WRAPS_CONVS, FACTORIZES_WEIGHTS},
        excludes={STANDARDIZES_WEIGHTS},
    )

    def __init__(
        self,
        eps: float = 5e-4,
        num_images: int = 5000,
        bias_duration: str | Time[Any] | None = "3ep",
        layer_name: str | None = None,
        input_key: Any = 0,
    ) -> None:
        check_finite("It is added to eigenvalues.", eps=eps, least=0)
        check_integers("Use 5000 as the paper does.", num_images=num_images, least=1)
        self._bias_time = _parse_time(bias_duration)
        self.eps, self.num_images = plain_number(eps), plain_number(num_images)
        self.bias_duration = None if self._bias_time is None else str(self._bias_time)
        self.layer_name, self.input_key = layer_name, input_key
        self.is_bias_frozen = False
        self._run: weakref.ref[State] | None = None

    @property
    def find_unused_parameters(self) -> bool:
        """True if the bias will be frozen, because it gets no gradient then."""
        return self._bias_time is not None

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the optimizer of a checkpoint lacks the filters, and the model may have another bias."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Return True at its events; at BATCH_START, when the bias has to be frozen."""
        if event is Event.BATCH_START:
            return not self.is_bias_frozen and self._bias_time is not None and has_passed(self._bias_time, state)
        return event in self.events

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layer, set its filters, or freeze its bias."""
        if event is Event.INIT:
            self._run = weakref.ref(state)
            if _prepare_layer(state.model, self.layer_name, state.optimizers) is None:
                warn_no_effect("`Whitening` will have no effect: the model has no `Conv2d`.")
            self._freeze_bias(state)
        elif event is Event.BATCH_START:
            self.is_bias_frozen = True
            self._freeze_bias(state)
        else:
            self._whiten(state, is_last_chance=event is Event.FIT_START)

    def _whiten(self, state: State, is_last_chance: bool) -> None:
        layer = _layer_of(state.model)
        if layer is None or layer.is_whitened:
            return
        loader = state.dataloader if state.train_dataloader is None else state.train_dataloader
        if loader is None:
            if is_last_chance:
                raise RuntimeError(
                    "`Whitening` needs images of the training data, but there is no training loader. Set "
                    "`state.train_dataloader`, or call `apply_whitening` with images."
                )
            return
        found: list[Any] = [None]
        if dist.get_global_rank() == 0:
            try:
                found = [_filters_for(layer, self._images(state, loader, layer.weight.device), self.eps).cpu()]
            except Exception as error:  # noqa: BLE001 - raised on all ranks, which would wait forever otherwise
                found = [error]
        dist.broadcast_object_list(found)
        if isinstance(found[0], Exception):
            raise found[0]
        layer.set_filters(found[0])

    def _images(self, state: State, loader: Any, device: torch.device) -> Iterator[torch.Tensor]:
        missing = self.num_images
        with seed_context(0):  # for transforms; the generators are restored afterwards
            for batch in _read(loader, self.num_images):
                images = batch_get(batch, state.batch_key(self.input_key, batch))
                _check_images(images)
                images = images[:missing]
                missing -= len(images)
                yield images.to(device) if device.type == "cuda" else images.cpu()
                if not missing:
                    return

    def _freeze_bias(self, state: State) -> None:
        layer = _layer_of(state.model)
        if self.is_bias_frozen and layer is not None:
            layer.bias.requires_grad_(False)
            layer.bias.grad = None  # the optimizer will not clear it, but gradient clipping would read it
            if state.optimizers:
                module_surgery.update_params_in_optimizer([layer.bias], [], state.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return whether the bias is frozen; the filters are in the model."""
        return {**super().state_dict(), "is_bias_frozen": self.is_bias_frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Freeze the bias if it was frozen: the optimizer, which is loaded next, must hold the other parameters."""
        self.is_bias_frozen = state.get("is_bias_frozen", False)
        run = None if self._run is None else self._run()
        if run is not None:
            self._freeze_bias(run)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}  # a copy belongs to no run


def _read(loader: Any, number: int) -> Iterator[Any]:
    """Yield batches of about `number` samples, without moving the position of the loader."""
    dataset = getattr(loader, "dataset", None)
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None and is_indexed:
        assert dataset is not None, "a loader has one"
        if not isinstance(dataset, IterableDataset):
            count = len(dataset)
            spread = [index * count // min(number, count) for index in range(min(number, count))]
            for first in range(0, len(spread), _READ):
                yield loader.collate_fn([dataset[index] for index in spread[first : first + _READ]])
            return
    if isinstance(loader, (list, tuple)):
        yield from loader
    elif hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        position = loader.state_dict()
        try:
            yield from loader
        finally:
            loader.load_state_dict(position)
    else:
        raise TypeError(
            f"`Whitening` must read images without moving the position of `train_dataloader`: a "
            f"`torch.utils.data.DataLoader` of a dataset with a length, a list of batches, or a loader with "
            f"`state_dict` and `load_state_dict`, got {type(loader).__name__}. Or call `apply_whitening` with images."
        )


def _check_images(images: Any) -> None:
    if not isinstance(images, torch.Tensor) or not images.is_floating_point():
        got = str(images.dtype) if isinstance(images, torch.Tensor) else type(images).__name__
        raise TypeError(
            f"The images to whiten must be a floating tensor, as the model sees them, got {got}. Normalize them in the "
            f"dataset, pass their position in the batch as `input_key`, or call `apply_whitening` with images."
        )
    if images.dim() != 4:
        raise ValueError(
            f"The images to whiten must have shape (N, C, H, W), got {tuple(images.shape)}. Pass their position in the "
            f"batch as `input_key`."
        )


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _parse_time(given: Any) -> Time[Any] | None:
    if given is None:
        return None
    if not isinstance(given, (str, Time)):
        raise TypeError(f"`bias_duration` must be a time string, a `Time` or None, got {given!r}. Write '3ep'.")
    time = Time.from_input(given)
    if time.value < 0:
        raise ValueError(f"`bias_duration` must not be negative, got {str(given)!r}. Use '0ep' to train no bias.")
    return time
