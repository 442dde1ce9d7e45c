"""Choose whether `state_dict` of a sharded model returns whole or sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def fsdp_state_dict_type_context(module: torch.nn.Module, state_dict_type: str = "full") -> Iterator[None]:
    """Make `module.state_dict()` return whole or sharded tensors for sharded parameters.

    Args:
        module: The module; its parameters may be sharded by `fully_shard`.
        state_dict_type: "full": whole tensors, in host memory of every rank; `module.state_dict()` is then a collective
            operation. "sharded": the `DTensor` of each rank, as outside the context.

    Raises:
        NotImplementedError: `state_dict_type` is another one, such as "local" of FSDP version 1.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> with fsdp_state_dict_type_context(layer, "full"):
        ...     sorted(layer.state_dict())
        ['bias', 'weight']
    """
    if state_dict_type not in ("full", "sharded"):
        raise NotImplementedError(f"`state_dict_type` must be 'full' or 'sharded', got {state_dict_type!r}.")
    if state_dict_type == "sharded":
        yield
        return
    handle = module.register_state_dict_post_hook(_gather_shards)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


def _gather_shards(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    from torch.distributed.tensor import DTensor  # slow to import

    for key, value in state_dict.items():
        if isinstance(value, DTensor):
            whole: torch.Tensor = value.full_tensor()
            state_dict[key] = whole.detach().cpu()
