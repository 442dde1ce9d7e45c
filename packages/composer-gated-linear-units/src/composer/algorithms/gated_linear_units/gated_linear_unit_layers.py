"""The gated feed-forward layer. It only needs torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class BERTGatedFFOutput(nn.Module):
    """A feed-forward block of BERT with a gate, its residual connection and its norm.

    `LayerNorm(wo(dropout(act(gated_layer(x)) * non_gated_layer(x))) + residual)`.

    Args:
        d_embed: Width of the inputs and outputs.
        d_ff: Width of the gate and of the gated values.
        dropout_rate: Probability of zeroing a gated value.
        act_fn: The activation of the gate.
        layernorm_eps: Epsilon of the norm.
        gated_layer_bias: True if the gate has a bias.
        non_gated_layer_bias: True if the linear layer of the gated values has a bias.

    Attributes:
        gated_layer: The gate, a `torch.nn.Linear`.
        non_gated_layer: The linear layer of the gated values.
        wo: The projection back to the width of the inputs; always with a bias.
        dropout: The dropout.
        act: The activation.
        layernorm: The norm.

    Example:
        >>> layer = BERTGatedFFOutput(8, 32, dropout_rate=0.1, act_fn=torch.nn.GELU(), layernorm_eps=1e-12)
        >>> x = torch.zeros(2, 5, 8)
        >>> layer(x, x).shape
        torch.Size([2, 5, 8])

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, section 2.
    Differs: the layer includes a bias in `wo`, dropout, residual connection and norm, as in BERT.
    """

    def __init__(
        self,
        d_embed: int,
        d_ff: int,
        dropout_rate: float,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        layernorm_eps: float,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gated_layer = nn.Linear(d_embed, d_ff, bias=gated_layer_bias)
        self.non_gated_layer = nn.Linear(d_embed, d_ff, bias=non_gated_layer_bias)
        self.wo = nn.Linear(d_ff, d_embed)
        self.dropout = nn.Dropout(dropout_rate)
        self.act = act_fn
        self.layernorm = nn.LayerNorm(d_embed, eps=layernorm_eps)

    def forward(self, hidden_states: torch.Tensor, residual_connection: torch.Tensor) -> torch.Tensor:
        """Compute the block.

        Args:
            hidden_states: Shape (..., d_embed).
            residual_connection: Added before the norm; the same shape.
        """
        gated = self.act(self.gated_layer(hidden_states)) * self.non_gated_layer(hidden_states)
        output: torch.Tensor = self.layernorm(self.wo(self.dropout(gated)) + residual_connection)
        return output

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise ValueError: for `composer.export.plain_state_dict`."""
        raise ValueError("it multiplies by a gate, which the feed-forward layer of a BERT does not")
