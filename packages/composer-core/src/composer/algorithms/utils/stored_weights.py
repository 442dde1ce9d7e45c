"""A second set of a model's weights, such as averages, and the fused operations between it and the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from operator import getitem, is_
from typing import Any

import torch

from composer.utils import dist, local_part
from composer.utils.misc import is_model_fsdp2, unwrapped_model

_CHUNK = 2**22  # elements per step of a checksum: bounds its memory
_SLICE = 32  # tensors exchanged at once: fused, without a second copy of the whole model


class StoredWeights:
    """A second set of a model's trainable parameters and of its buffers: their averages, until these are swapped in.

    Of the buffers, only running statistics are averaged; see `is_averaged_buffer`. The others are copied.

    Each average is a separate tensor, in float32 if the dtype of the model has less precision: with a smoothing close
    to 1, the updates of an average in bfloat16 or float16 would round to nothing. Averages follow the device and the
    memory format of the model, and are sharded like it.

    With a `blend`, a mixture of both sets is swapped in: `(1 - share) * weight + share * average`. What has the share 0
    is not averaged and keeps its training weights.

    Args:
        model: The model with the initial values. None: nothing is stored yet.
        blend: The shares, by regular expressions on the names of parameters and running statistics; the first that is
            found in a name counts. The share of the others is 1.

    Attributes:
        blend: The argument.
        named_parameters_dict: The average of each trainable parameter or, while swapped, its training weights.
        named_buffers_dict: The same for each buffer.
        swapped: True if the averages are in the model, and its training weights here.
    """

    def __init__(self, model: torch.nn.Module | None, blend: Mapping[str, float] | None = None) -> None:
        self.blend = dict(blend or {})
        self.named_parameters_dict: dict[str, torch.Tensor] = {}
        self.named_buffers_dict: dict[str, torch.Tensor] = {}
        self.swapped = False
        # While swapped: the averages that the model does not hold exactly, because its dtype has less precision or
        # because it holds a mixture.
        self._averages: dict[str, torch.Tensor] = {}
        # Checksums of the averages that are in the model after training, where the user may change them.
        self._checksums: dict[str, tuple[torch.dtype, int]] | None = None
        self._links: _MatchedTensors | None = None
        if model is not None:
            model = unwrapped_model(model)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and self._share(self.named_parameters_dict, name):
                    self._add(name, parameter)
            for name, buffer in model.named_buffers():
                dtype = average_dtype(buffer.dtype) if is_averaged_buffer(name) else buffer.dtype
                self.named_buffers_dict[name] = _fitted(buffer, buffer, dtype)

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        self.named_parameters_dict[name] = _fitted(parameter, parameter, average_dtype(parameter.dtype))

    def _share(self, store: dict[str, torch.Tensor], name: str) -> float:
        """Return the share of the average in what is swapped in; it is 1 for a buffer that is copied."""
        if store is self.named_buffers_dict and not is_averaged_buffer(name):
            return 1.0
        return next((share for pattern, share in self.blend.items() if re.search(pattern, name)), 1.0)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return pairs of name and stored tensor of the parameters."""
        return iter(self.named_parameters_dict.items())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return pairs of name and stored tensor of the buffers."""
        return iter(self.named_buffers_dict.items())

    @torch.no_grad()
    def update(self, model: torch.nn.Module, smoothing: float) -> None:
        """Move every average towards the model: one fused operation per device and dtype.

        A parameter that has become trainable is averaged from now on, starting with its current value. Tensors are
        matched by name once, and again when a tensor or module of the model is replaced.

        Args:
            model: The model.
            smoothing: The weight of the average, in [0, 1].

        Raises:
            RuntimeError: The averages are in the model, or the shape of a parameter has changed.
        """
        if self.swapped:
            raise RuntimeError(
                "The averages are in the model and cannot follow it. Swap them out first; in a loop of your own, "
                "announce BATCH_START before each batch."
            )
        links = self._link(model)
        if any(parameter.requires_grad for parameter in links.frozen.values()):
            for name, parameter in links.frozen.items():
                if parameter.requires_grad:
                    self._add(name, parameter)
            self._links = None
            links = self._link(model)
        links.exact.update(smoothing)
        links.inexact.update(smoothing)

    @torch.no_grad()
    def swap(self, model: torch.nn.Module) -> None:
        """Exchange the stored tensors with the model's, in place. A second call undoes the first, bit for bit.

        Args:
            model: The model; its tensors stay the same objects at the same addresses.
        """
        links = self._link(model)
        links.exact.exchange()
        for store, name, tensor in links.inexact_at:
            if self.swapped:
                tensor.copy_(store[name])
                store[name] = self._averages.pop(name)
            else:
                self._averages[name], store[name] = store[name], tensor.detach().clone()
                _blend_into(tensor, self._averages[name], self._share(store, name))
        self.swapped = not self.swapped
        self._checksums = None

    @torch.no_grad()
    def record_checksums(self, model: torch.nn.Module) -> None:
        """Record checksums of the averages that stay in the model, for `adopt_changes`. Reads one number per tensor.

        Args:
            model: The model, which holds the averages.
        """
        self._checksums = {name: checksum_of(tensor) for _, name, tensor in self._stored_of(model)}

    @torch.no_grad()
    def adopt_changes(self, model: torch.nn.Module) -> list[str]:
        """Adopt the parameters that were changed since `record_checksums`, as averages and as training weights.

        Buffers are adopted only together with parameters, because an evaluation may change some.

        Args:
            model: The model, which holds the averages.

        Returns:
            The names of the parameters that were changed.
        """
        checksums, self._checksums = self._checksums, None
        if checksums is None or not self.swapped:
            return []
        tensors = [(store, name, tensor) for store, name, tensor in self._stored_of(model) if name in checksums]
        changed = {name for _, name, tensor in tensors if checksums[name] != checksum_of(tensor)}
        if any(local_part(tensor) is not tensor for _, _, tensor in tensors):  # each rank sees only its shard
            changed = set().union(*dist.all_gather_object(changed))
        parameters = [name for name in self.named_parameters_dict if name in changed]
        if not parameters:
            return []
        self._links = None
        for store, name, tensor in tensors:
            if name in changed:
                store[name] = _fitted(tensor, tensor, tensor.dtype)
                self._averages.pop(name, None)  # taken from the model then
        return parameters

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module) -> None:
        """Copy the stored tensors into a model. Averages with a share below 1 are mixed with what the model holds.

        Args:
            model: The model.

        Raises:
            ValueError: It has none of the parameters.
        """
        found = list(self._stored_of(model))
        if self.named_parameters_dict and not found:
            raise ValueError(
                f"`model` must have parameters under the names of the run's, such as "
                f"{next(iter(self.named_parameters_dict))!r}, but this {type(model).__name__} has none of them. Pass a "
                f"copy of `state.model`."
            )
        for store, name, tensor in found:
            _blend_into(tensor, store[name], 1.0 if self.swapped else self._share(store, name))

    @torch.no_grad()
    def move_to(self, model: torch.nn.Module) -> None:
        """Move the stored tensors to the devices of a model's tensors.

        Args:
            model: The model.
        """
        self._links = None
        self._link(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the stored tensors by name."""
        saved: dict[str, Any] = {
            "named_parameters_dict": dict(self.named_parameters_dict),
            "named_buffers_dict": dict(self.named_buffers_dict),
        }
        return saved | {"averages": dict(self._averages)} if self._averages else saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store copies of what `state_dict` returned, or of a flat dictionary of tensors.

        MosaicML's Composer before 0.13 saved such a dictionary.

        Args:
            state: A dictionary returned by `state_dict`.

        Raises:
            ValueError: It is neither.
        """
        if "named_parameters_dict" not in state:
            if not all(isinstance(value, torch.Tensor) for value in state.values()):
                raise ValueError(
                    "The saved averages must be a dictionary of tensors by name. Load the checkpoint without the state "
                    "of the algorithm; averaging then starts again from the current weights."
                )
            # The names stored now, which come from the model, distinguish parameters from buffers.
            state = {
                "named_parameters_dict": {name: state[name] for name in self.named_parameters_dict if name in state},
                "named_buffers_dict": {name: state[name] for name in self.named_buffers_dict if name in state},
            }
        self._links = self._checksums = None
        self.named_parameters_dict = _copies(state["named_parameters_dict"])
        self.named_buffers_dict = _copies(state["named_buffers_dict"])
        self._averages = _copies(state.get("averages", {}))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_links": None}  # a copy has other tensors, and must not hold the model

    def _walk(
        self, model: torch.nn.Module
    ) -> Iterable[tuple[dict[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]]:
        yield self.named_parameters_dict, model.named_parameters()
        yield self.named_buffers_dict, model.named_buffers()

    def _stored_of(self, model: torch.nn.Module) -> Iterator[tuple[dict[str, torch.Tensor], str, torch.Tensor]]:
        model = unwrapped_model(model)
        reshard(model)
        for store, named in self._walk(model):
            yield from ((store, name, tensor) for name, tensor in named if name in store)

    def _link(self, model: torch.nn.Module) -> _MatchedTensors:
        model = unwrapped_model(model)
        reshard(model)
        links = self._links
        if links is None or not links.are_current(model):
            self._links, links = None, _MatchedTensors(model)
            for store, named in self._walk(model):
                for name, tensor in named:
                    if name in store:
                        self._link_one(links, store, name, tensor)
                    elif store is self.named_parameters_dict and self._share(store, name):
                        links.frozen[name] = tensor
            self._links = links
        return links

    def _link_one(
        self, links: _MatchedTensors, store: dict[str, torch.Tensor], name: str, tensor: torch.Tensor
    ) -> None:
        stored = store[name]
        if stored.shape != tensor.shape:
            if store is self.named_parameters_dict:
                raise RuntimeError(
                    f"The average of {name!r} has the shape {tuple(stored.shape)}, but the model's parameter has "
                    f"{tuple(tensor.shape)}. Change the model before averaging starts, or create the averages "
                    f"again from the changed model."
                )
            stored = tensor  # a buffer that has grown, such as a cache, starts again
        copied = store is self.named_buffers_dict and not is_averaged_buffer(name)
        exact = tensor.dtype if copied else average_dtype(tensor.dtype)
        # A loaded checkpoint may hold a mixture although the shares are 1 now.
        if exact is tensor.dtype and self._share(store, name) == 1 and name not in self._averages:
            store[name] = _fitted(stored, tensor, exact)
            links.exact.add(store[name], tensor, copied=copied)
            return
        if self.swapped:
            average = self._averages[name] = _fitted(self._averages.get(name, tensor), tensor, exact)
            store[name] = _fitted(stored, tensor, tensor.dtype)
        else:
            average = store[name] = _fitted(stored, tensor, exact)
        links.inexact.add(average, tensor)
        links.inexact_at.append((store, name, tensor))


class Pairs:
    """Pairs of average and value, grouped by device and dtype: an operation is one fused call per group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def add(self, average: torch.Tensor, value: torch.Tensor, *, copied: bool = False) -> None:
        """Add a pair, whose value is copied in place of being averaged if `copied` is True or it has integers."""
        average, value = local_part(average), local_part(value)
        copied = copied or not (average.is_floating_point() or average.is_complex())
        key = (copied, average.device, average.dtype, value.device, value.dtype)
        averages, values = self._groups.setdefault(key, ([], []))
        averages.append(average)
        values.append(value)

    def update(self, smoothing: float) -> None:
        """Set `average <- smoothing * average + (1 - smoothing) * value`; copy if it is 0, and all pairs to copy."""
        for (copied, device, dtype, *source), (averages, values) in self._groups.items():
            if source != [device, dtype]:
                values = [value.to(device, dtype) for value in values]
            if copied or not smoothing:
                torch._foreach_copy_(averages, values)
            else:
                torch._foreach_lerp_(averages, values, 1 - smoothing)

    def exchange(self) -> None:
        """Exchange averages and values, which must have the same dtype."""
        for averages, values in self._groups.values():
            for start in range(0, len(averages), _SLICE):
                some_averages, some_values = averages[start : start + _SLICE], values[start : start + _SLICE]
                copies = [value.clone() for value in some_values]
                torch._foreach_copy_(some_values, some_averages)
                torch._foreach_copy_(some_averages, copies)


class _MatchedTensors:
    """The pairs of a model's tensors and their averages.

    Attributes:
        exact: Averages that the model can hold.
        inexact: Averages with more precision than the model's tensors, or with a share below 1 in what is swapped in.
        inexact_at: For each of the latter, the dictionary that stores it, its name, and the model's tensor.
        frozen: Parameters without an average, by name; they get one when they require gradients.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.exact, self.inexact = Pairs(), Pairs()
        self.inexact_at: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []
        self.frozen: dict[str, torch.Tensor] = {}
        self._model = model
        # All modules and tensors of the model, to detect cheaply that one was replaced.
        entries = [
            (members, key, value)
            for module in model.modules()
            for members in (module._modules, module._parameters, module._buffers)
            for key, value in members.items()
        ]
        self._holders: list[Any] = [holder for holder, _, _ in entries]
        self._keys, self._values = [key for _, key, _ in entries], [value for _, _, value in entries]

    def are_current(self, model: torch.nn.Module) -> bool:
        """Return True for the same model with the same modules and tensors."""
        try:
            return model is self._model and all(map(is_, map(getitem, self._holders, self._keys), self._values))
        except KeyError:
            return False


def is_averaged_buffer(name: str) -> bool:
    """Return True for the buffers that an average treats like weights; it copies the others from the latest model.

    Averaged are running statistics, which torch names `running_mean` and `running_var`. A mean of other buffers may not
    be a valid value: the power-iteration vectors of a spectral norm lose their unit length, infinite entries of a mask
    become NaN, and counters, caches and observers have no mean at all.

    Args:
        name: The name of a buffer, also with the names of its modules.

    Example:
        >>> is_averaged_buffer("1.running_var"), is_averaged_buffer("0.parametrizations.weight.0._u")
        (True, False)
    """
    return name.rpartition(".")[2].startswith("running_")


def average_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for averages of tensors of a dtype: float32 if that has less precision."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize else dtype


def _fitted(stored: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `stored`, or a copy of it, with the device and the strides of `like`, but never `like` itself."""
    if stored is not like and (stored.device, stored.dtype, stored.stride()) == (like.device, dtype, like.stride()):
        return stored
    return torch.empty_like(like.detach(), dtype=dtype).copy_(stored.detach())


def _blend_into(tensor: torch.Tensor, average: torch.Tensor, share: float) -> None:
    """Set `tensor <- (1 - share) * tensor + share * average`, in the dtype of the average."""
    if share == 1:
        tensor.copy_(average)
    else:
        weight, average = local_part(tensor), local_part(average)
        weight.copy_(weight.to(average.device, average.dtype).lerp(average, share))


def checksum_of(tensor: torch.Tensor) -> tuple[torch.dtype, int]:
    """Return a hash of the bits of a tensor, or of this rank's part of it, and the dtype; strides do not matter."""
    flat = local_part(tensor.detach()).reshape(-1).contiguous()
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.dtype.itemsize, torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        # The finalizer of SplitMix64 on value and position; wrapping sums are exact in any order.
        chunk = bits[start : start + _CHUNK]
        mixed = chunk + torch.arange(start, start + len(chunk), device=bits.device) * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += (mixed ^ (mixed >> 31)).sum()
    return tensor.dtype, int(total)


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def reshard(model: torch.nn.Module) -> None:
    """Reshard a model: after a pass without gradients, `fully_shard` leaves its parameters unsharded.

    Args:
        model: The model, sharded or not.
    """
    if is_model_fsdp2(model):
        for module in model.modules():
            put_back = getattr(module, "reshard", None)
            if put_back is not None:
                put_back()
