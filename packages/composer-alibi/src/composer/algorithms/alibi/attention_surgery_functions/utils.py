"""The registry of policies, and functions for policies. Symbols: H heads, L maximum number of tokens."""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

_log = logging.getLogger(__name__)

AlibiReplacementFunction = Callable[[nn.Module, int, int], nn.Module | None]
"""Takes a module, the number of modules its policy was called for before, and `max_sequence_length`; returns a
replacement, the same module (changed in place), or None to leave it unchanged."""

_Policy = TypeVar("_Policy", bound=AlibiReplacementFunction)


class PolicyRegistry(dict[type[nn.Module], AlibiReplacementFunction]):
    """Mapping from classes of modules to the functions that change them. Entries may be deleted.

    Example:
        >>> registry = PolicyRegistry()
        >>> @registry.register(torch.nn.MultiheadAttention)
        ... def biased(
        ...     module: torch.nn.Module, module_index: int, max_sequence_length: int
        ... ) -> torch.nn.Module | None:
        ...     return None  # or the module with the bias in its attention
        >>> registry[torch.nn.MultiheadAttention] is biased
        True
    """

    def register(self, *modules: type[nn.Module]) -> Callable[[_Policy], _Policy]:
        """Register the decorated function as the policy for classes of modules.

        The function takes `(module: torch.nn.Module, module_index: int, max_sequence_length: int)`, in this order; the
        first two may have other names. Annotations may be postponed.

        Args:
            *modules: The classes, none of which may have a policy yet.

        Raises:
            ValueError: No class is given, one has a policy already, or the function does not take three arguments.
            TypeError: A class is not a `torch.nn.Module`, or an argument has another annotation.
            NameError: The third argument has another name.
        """
        if not modules:
            raise ValueError("`modules` must not be empty. Pass the classes that the function changes.")

        def decorator(function: _Policy) -> _Policy:
            _check_policy(function)
            classes: tuple[Any, ...] = modules
            for module in classes:
                if not (isinstance(module, type) and issubclass(module, nn.Module)):
                    raise TypeError(f"`modules` must be subclasses of `torch.nn.Module`, got {module!r}.")
                if module in self:
                    raise ValueError(
                        f"`modules` must not have a policy yet, but {module.__name__} has `{self[module].__name__}`. "
                        f"Delete it first: `del policy_registry[{module.__name__}]`."
                    )
            self.update(dict.fromkeys(modules, function))
            return function

        return decorator


policy_registry = PolicyRegistry()
"""The policies of `apply_alibi`. Register policies for other models here."""


def _check_policy(function: Callable[..., Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 3:
        raise ValueError(
            f"`{function.__name__}` must take three arguments (module, module_index, max_sequence_length), got "
            f"{len(parameters)}."
        )
    for parameter, expected in zip(parameters, (nn.Module, int, int), strict=True):
        if not _is_annotated(parameter, expected, function):
            raise TypeError(
                f"`{parameter.name}` of `{function.__name__}` must be annotated `{expected.__name__}`, got "
                f"{parameter.annotation!r}."
            )
    if parameters[2].name != "max_sequence_length":
        raise NameError(
            f"The third argument of `{function.__name__}` must be named `max_sequence_length`, got "
            f"`{parameters[2].name}`."
        )


def _is_annotated(parameter: inspect.Parameter, expected: type, function: Callable[..., Any]) -> bool:
    annotation = parameter.annotation
    if not isinstance(annotation, str):  # a postponed annotation is a string
        return annotation is expected
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        resolved: Any = typing.get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), globalns=scope)["it"]
    except (NameError, AttributeError):  # the name is not importable at run time, so compare the names
        return annotation.rpartition(".")[2] == expected.__name__
    return resolved is expected


def register_alibi(module: nn.Module, n_heads: int, max_token_length: int, causal: bool) -> nn.Module:
    """Add the bias to an attention module as a buffer `alibi`, which its `forward` must add to the scores.

    With the slope m of a head, the bias of query i and key j is `-m * |i - j|`. If a causal mask hides later keys, it
    is `m * j`: this differs by a constant for all keys of a query, and so gives the same softmax. The buffer is not
    saved in checkpoints. A second call replaces it. If the module has another attribute `alibi`, the buffer is called
    `composer_alibi`.

    Args:
        module: The module, changed in place.
        n_heads: H.
        max_token_length: L, the length of the longest sequence.
        causal: True if a causal mask is used, so that the smaller form is sufficient.

    Returns:
        The module. Its `alibi`, or `composer_alibi`, has shape (1, H, L, L), or (H, 1, L) if `causal`, on the module's
        device, in float32.

    Example:
        >>> register_alibi(torch.nn.Module(), n_heads=2, max_token_length=3, causal=True).alibi
        tensor([[[0.0000, 0.0625, 0.1250]],
        <BLANKLINE>
                [[0.0000, 0.0039, 0.0078]]])

    Source: Press et al., arXiv:2108.12409, section 3.
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)
    slopes = torch.tensor(get_alibi_head_slopes(n_heads), device=device)[:, None, None]
    positions = torch.arange(max_token_length, device=device)
    if causal:
        bias = slopes * positions
    else:
        bias = (-slopes * (positions[:, None] - positions).abs())[None]
    is_available = "alibi" in module._buffers or not hasattr(module, "alibi")
    module.register_buffer("alibi" if is_available else "composer_alibi", bias, persistent=False)
    return module


def get_alibi_head_slopes(n_heads: int) -> list[float]:
    """Return the slope of each head.

    For n heads, n a power of 2: the geometric sequence that starts with 2^(-8/n) and has it as its ratio. Otherwise
    the slopes of the next lower power of 2, then every second one of twice that power.

    Args:
        n_heads: The number of heads.

    Raises:
        ValueError: `n_heads` is less than 1.

    Example:
        >>> get_alibi_head_slopes(6)
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]

    Source: Press et al., arXiv:2108.12409, section 3; the code of the paper for numbers that are not powers of 2.
    """
    if n_heads < 1:
        raise ValueError(f"`n_heads` must be at least 1, got {n_heads!r}.")
    n = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * k / n) for k in range(1, n + 1)]
    between = [2.0 ** (-4 * k / n) for k in range(1, 2 * n + 1, 2)]
    return slopes + between[: n_heads - n]


_get_alibi_head_slopes = get_alibi_head_slopes  # an earlier name


def zero_and_freeze_expand_position_embeddings(
    module: nn.Module, max_sequence_length: int, position_embedding_attribute: str
) -> None:
    """Resize a table of position embeddings in place, set it to zero and freeze it.

    The parameter stays the same object, so that optimizers and layers that share it need no change.

    Args:
        module: A module with the table.
        max_sequence_length: The new number of positions.
        position_embedding_attribute: Name of the table, a `torch.nn.Embedding`, in the module; may contain dots.

    Raises:
        AttributeError: The module has no such attribute.

    Example:
        >>> model = torch.nn.ModuleDict({"positions": torch.nn.Embedding(4, 2)})
        >>> zero_and_freeze_expand_position_embeddings(model, 8, "positions")
        >>> model["positions"].weight.shape, model["positions"].weight.requires_grad
        (torch.Size([8, 2]), False)
    """
    try:
        table = attrgetter(position_embedding_attribute)(module)
    except AttributeError:
        _log.error("%s has no `%s` to set to zero and freeze.", type(module).__name__, position_embedding_attribute)
        raise
    table.weight.requires_grad_(False)
    table.weight.grad = None
    table.weight.data = table.weight.new_zeros(max_sequence_length, table.weight.shape[1])
    table.num_embeddings = max_sequence_length
