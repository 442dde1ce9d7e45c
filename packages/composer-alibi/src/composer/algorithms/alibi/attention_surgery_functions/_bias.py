"""The bias of a model's attention layers. Symbols: B examples, H heads, q queries, n keys, L tokens at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit import is_tracing  # type: ignore[attr-defined]

__all__ = ["LinearBias"]

_is_tracing: Callable[[], bool] = is_tracing  # torch does not annotate it

_KEPT = "_composer_alibi"  # on a mask: the same mask with the bias
_ROUND = 128  # tables grow by this many positions, so that lengths that creep up rarely need a new one


class LinearBias:
    """The bias `-m * |i - j|`, made once for each dtype and device and shared by all layers.

    It is computed in float32 and rounded once. It is no buffer: `DistributedDataParallel` would send it to all ranks in
    every step, casting a model would round it twice, and checkpoints would grow.

    Args:
        n_heads: H.
        max_sequence_length: L.
    """

    def __init__(self, n_heads: int, max_sequence_length: int) -> None:
        self.n_heads = n_heads
        self.max_sequence_length = max_sequence_length
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}  # copies and pickles make their own

    def __setstate__(self, state: dict[str, Any]) -> None:
        from composer.algorithms.alibi.attention_surgery_functions._attention import register_attention

        self.__dict__.update(state)
        register_attention()  # a pickled model may be loaded where ALiBi was never applied

    def for_scores(self, query: torch.Tensor, n: int, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
        """What to add to the scores of a layer: the bias, and the mask.

        Args:
            query: Shape (B, H, q, d). If q < n, the keys before the last q come from a cache.
            n: The number of keys.
            mask: Shape (B or 1, H or 1, q, n): boolean, False where a query must not look, or to be added; or None.
            causal: Whether None means that later keys are hidden, rather than that none is.

        Returns:
            Shape (B or 1, H, q, n), in the dtype of `query`; must not be modified. Finite, also where a query sees
            nothing.

        Raises:
            ValueError: n is larger than L.
        """
        if n > self.max_sequence_length:
            raise ValueError(
                f"`max_sequence_length` must be at least the length of a sequence, got {self.max_sequence_length} for "
                f"{n} tokens. Apply ALiBi again with a larger one; trained weights stay as they are."
            )
        q, dtype, device = query.shape[2], query.dtype, query.device
        if mask is None:
            if q == 1:
                return self._line(dtype, device)[..., -n:]
            return self._square(n, dtype, device, causal)[..., n - q :, :]
        if _is_captured():  # a compiler sees by itself that all layers compute the same
            return self._masked(mask, q, n, dtype)
        # All layers get the same mask object: its sum with the bias is kept on it, and lives as long.
        key = (self, q, n, dtype, None if mask.is_inference() else mask._version)
        kept = getattr(mask, _KEPT, None)
        if kept is None or kept[0] != key:
            kept = key, self._masked(mask, q, n, dtype)
            setattr(mask, _KEPT, kept)
        result: torch.Tensor = kept[1]
        return result

    def _masked(self, mask: torch.Tensor, q: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        lowest = torch.finfo(dtype).min
        if q == n and mask.dtype is torch.bool:
            return torch.where(mask, self._square(n, dtype, mask.device, False), lowest)
        full = torch.promote_types(dtype, torch.float32)
        if q == n:
            bias = self._square(n, full, mask.device, False)
        else:
            bias = self._line(full, mask.device)[..., -n:]
        hidden = torch.finfo(full).min
        total = torch.where(mask, bias, hidden) if mask.dtype is torch.bool else bias + mask
        if q != n:
            # A cache of fixed size has empty places after the query, and far from its end a bias relative to that end
            # is too large to be exact in 16 bits. The nearest key that is seen gets 0; the softmax is the same.
            total = total - total.amax(dim=-1, keepdim=True)
        return total.clamp_min(lowest).to(dtype)

    def _square(self, n: int, dtype: torch.dtype, device: torch.device, causal: bool) -> torch.Tensor:
        """For n queries and keys: shape (1, H, n, n)."""

        def make(size: int) -> torch.Tensor:
            positions = torch.arange(size, device=device)
            distance = positions[:, None] - positions
            table = self._slopes(device) * -distance.abs()
            if causal:
                table = torch.where(distance >= 0, table, torch.finfo(dtype).min)
            return table.to(dtype)

        return self._kept((dtype, device, causal), n, make)[..., :n, :n]

    def _line(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """For one query after L keys: shape (1, H, 1, L)."""

        def make(size: int) -> torch.Tensor:
            return (self._slopes(device) * torch.arange(1 - size, 1, device=device)).to(dtype)

        return self._kept((dtype, device), self.max_sequence_length, make)

    def _kept(self, key: tuple[Any, ...], n: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """A table for at least n positions: one made before, if it is large enough."""
        if _is_captured():
            return make(n)
        table = self._made.get(key)
        if table is None or table.shape[-1] < n:
            with torch.inference_mode(False):  # training will use it, too
                table = make(min(-(-n // _ROUND) * _ROUND, self.max_sequence_length))
            if type(table) is torch.Tensor:  # not the fake one of a trial run
                self._made[key] = table
        return table

    def _slopes(self, device: torch.device) -> torch.Tensor:
        """`get_alibi_head_slopes`, computed on the device. Shape (1, H, 1, 1)."""
        n = 1 << (self.n_heads.bit_length() - 1)
        between = torch.arange(self.n_heads - n, device=device) + 0.5
        exponents = torch.cat([torch.arange(1, n + 1, device=device), between])
        return torch.exp2(exponents.float() * (-8 / n)).view(1, -1, 1, 1)


def _is_captured() -> bool:
    """Whether a graph is being captured, in which nothing may be kept."""
    return torch.compiler.is_compiling() or _is_tracing()
