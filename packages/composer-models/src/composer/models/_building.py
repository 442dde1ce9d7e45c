"""Helpers of the factories: checks of arguments, initialization, pretrained weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchvision.models import WeightsEnum, get_model_weights

from composer.models.initializers import Initializer

Initializers = Sequence[Initializer | str] | Initializer | str | None


def as_initializers(initializers: Initializers) -> tuple[Initializer, ...]:
    """Return the initializers as a tuple of members."""
    if initializers is None:
        return ()
    if isinstance(initializers, Initializer | str):
        return (Initializer(initializers),)
    return tuple(map(Initializer, initializers))


def initialize(network: nn.Module, initializers: Initializers) -> None:
    """Apply initializers, members or names, to all layers of a network in place, one after the other."""
    for initializer in as_initializers(initializers):
        network.apply(initializer.get_initializer())


def pretrained(model_name: str, weights: str | WeightsEnum) -> dict[str, Tensor]:
    """Return torchvision's weights of one of its models, from the cache of `torch.hub` or downloaded.

    Args:
        model_name: torchvision's name of the model.
        weights: The name of the weights, for example "IMAGENET1K_V2" or "DEFAULT".

    Raises:
        ValueError: There are no weights of that name.
    """
    choices = get_model_weights(model_name)
    name = weights.name if isinstance(weights, WeightsEnum) else weights.removeprefix(f"{choices.__name__}.")
    if (isinstance(weights, WeightsEnum) and not isinstance(weights, choices)) or name not in choices.__members__:
        raise ValueError(
            f"`weights` of {model_name} must be one of {list(choices.__members__)}, got {str(weights)!r}. "
            f"Use 'DEFAULT' for the best ones."
        )
    # The file has only tensors; torch.hub's default would let it run code.
    state: dict[str, Tensor] = choices[name].get_state_dict(check_hash=True, weights_only=True, map_location="cpu")
    return state


def load_all_but(network: nn.Module, state: dict[str, Tensor], head: str) -> None:
    """Load weights, except those of the last layer if its number of outputs differs.

    Args:
        network: Changed in place.
        state: A state dict of the network with any number of classes.
        head: The name of the last layer.
    """
    current: dict[str, Any] = {k: v for k, v in network.state_dict().items() if k.startswith(f"{head}.")}
    if any(value.shape != state[name].shape for name, value in current.items()):
        state = {**state, **current}
    network.load_state_dict(state)
