"""The recipes of `composer-train gpt_record`: the network of the public records of training a GPT, and their methods.

`--config record` composes them, a line of `record.yaml` for each; `--without NAME` leaves one out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composer.algorithms.cautious_decay import CautiousDecay
from composer.algorithms.ema import EMA
from composer.algorithms.ema_nesterov import EMANesterov
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.hyperball import Hyperball
from composer.algorithms.muon import Muon
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel
from composer.optim import ComposerScheduler, PolynomialWithWarmupScheduler
from composer.recipes._recipe import AdamW, Metric, Task, check_at_least
from composer.recipes.tiny_lm import Data, Text

__all__ = ["TASK", "Data", "Network", "RecordGPT", "Training", "composed", "plain"]

_IGNORED = -100


class RecordGPT(ComposerModel):
    """The network of the public records: a GPT with rotary positions, normalized queries and keys, and squared ReLUs.

    Normalizations have no weights, layers no biases; head and embedding are not tied.

    Args:
        vocab_size: Number of tokens.
        width: Size of the embeddings.
        layers: Number of blocks, each attention and a feed-forward layer of four times the width.
        heads: Attention heads per block; the width divided by it must be even.
        projection_std: Standard deviation of the initial weights of the last matrix of each branch, as a multiple of
            that of the others. 0: a block begins as the identity.

    Example:
        >>> network = RecordGPT(vocab_size=5, width=8, layers=1, heads=2)
        >>> network({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}).shape
        torch.Size([2, 3, 5])

    Source: RoPE arXiv:2104.09864; queries and keys: arXiv:2010.04245; squared ReLU: arXiv:2109.08668.
    """

    shift_labels = True  # labels are the inputs; the loss compares with the next token

    def __init__(
        self, vocab_size: int, width: int = 128, layers: int = 4, heads: int = 4, projection_std: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([_Block(width, heads, projection_std) for _ in range(layers)])
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, batch: Any) -> Tensor:
        """Return logits, shape (N, tokens, vocab_size)."""
        x = F.rms_norm(self.embedding(batch["input_ids"]), (self.embedding.embedding_dim,))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return logits

    def loss(self, outputs: Tensor, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the cross-entropy of the next tokens."""
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=_IGNORED)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics of the evaluation."""
        return {} if is_train else {"LanguageCrossEntropy": LanguageCrossEntropy(ignore_index=_IGNORED)}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Any) -> None:
        """Update a metric with the next tokens."""
        metric.update(outputs[:, :-1], batch["labels"][:, 1:])


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, projection_std: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        with torch.no_grad():
            for projection in (self.attention_out, self.down):
                projection.weight.mul_(projection_std)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        normalized = F.rms_norm(x, (width,))
        q, k, v = self.qkv(normalized).view(n, length, 3, self.heads, -1).unbind(2)
        q, k = (_rotated(F.rms_norm(each, each.shape[-1:])).transpose(1, 2) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(n, length, width))
        x = x + self.down(F.relu(self.up(F.rms_norm(x, (width,)))).square())
        return x


def _rotated(x: Tensor) -> Tensor:
    """Rotate pairs of features by angles that grow with the position; shape (N, tokens, heads, features)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@dataclass(frozen=True)
class Network:
    """`RecordGPT`.

    Args:
        width: Size of the embeddings.
        layers: Number of blocks.
        heads: Attention heads per block; the width divided by it must be even.
        projection_std: Initial size of the last matrix of each branch, as a multiple of that of the others.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    projection_std: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("projection_std", self.projection_std, 0)
        if self.width % (2 * self.heads):
            raise ValueError(f"`width` must be a multiple of 2 * `heads`, got {self.width} and {self.heads}.")

    def build(self, dataset: Text) -> ComposerModel:
        """Return a new network for the characters or tokens of a text."""
        return RecordGPT(dataset.vocab_size, self.width, self.layers, self.heads, self.projection_std)


@dataclass(frozen=True)
class Training(AdamW):
    """AdamW for all weights; `Muon` takes the hidden matrices. Linear warmup, then `(1 - t / T) ** power`.

    Args:
        power: The exponent of the decay of the learning rate.
        t_max: The T of its formula, as a fraction of the run. Above 1, the last steps still move.
    """

    epochs: float = 6
    lr: float = 4e-3
    power: float = 1.2
    t_max: float = 1.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("power", self.power, 0)
        check_at_least("t_max", self.t_max, 1)

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        return PolynomialWithWarmupScheduler(f"{self.warmup}dur", self.power, t_max=f"{self.t_max}dur")


TASK = Task(
    name="gpt_record",
    summary=(
        "Train the GPT of the public records on a text, first with AdamW and then with Muon, and compare. "
        "`--config record` composes what wins the records, one line for each method; `--without NAME` leaves one out."
    ),
    data=Data(),
    network=Network(),
    training=Training(),
    metrics=(Metric("LanguageCrossEntropy", "nats per character", higher_is_better=False),),
    algorithms={
        "cautious_decay": CautiousDecay,
        "ema": EMA,
        "ema_nesterov": EMANesterov,
        "gradient_clipping": GradientClipping,
        "hyperball": Hyperball,
        "muon": Muon,
    },
    chosen=("muon",),
    tuned={
        "ema": {"half_life": "20ba"},
        "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    },
    stacks={"record": Path(__file__).with_name("record.yaml")},
)
"""The defaults of `composer-train gpt_record`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
