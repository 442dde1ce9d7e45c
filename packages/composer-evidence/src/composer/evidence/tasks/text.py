"""Tasks on text: the characters of Tiny Shakespeare, also for a larger network, and of the help of Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from composer.core import Callback, State
from composer.datasets import CharTokenizer, build_text_dataloader
from composer.devices import Device
from composer.evidence.run import cache_folder, write_atomically
from composer.evidence.task import Grid, Part, Task, Variant
from composer.loggers import Logger
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel, HuggingFaceModel, create_gpt2
from composer.optim import ComposerScheduler
from composer.recipes import AdamW, Metric, tiny_lm
from composer.recipes.gpt_record import RecordGPT

_PARTS = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
_GRID = {
    "lr": Grid((6e-3, 1.2e-2)),
    "warmup": Grid((0.1, 0.3, 0.5), low=0.01, high=0.9),
    "initial_std": Grid((0.04, 0.06, 0.08), low=0.005, high=0.2),
    "weight_decay": Grid((0.1, 0.3)),
    "beta2": Grid((0.95, 0.99), high=0.999),
    "final_lr": Grid((0.0, 0.1), high=0.5),
    "max_norm": Grid((0.25, 0.5), high=8.0),
}
_SHORT_GRID = {name: _GRID[name] for name in ("lr", "warmup", "initial_std")}
# What a search from torch's defaults found on the full budget of `shakespeare`; every search begins there.
_START = {"weight_decay": 0.1, "beta2": 0.95, "warmup": 0.3, "initial_std": 0.08, "final_lr": 0.1, "max_norm": 0.25}


class _ClipNorm(Callback):
    """Clip the norm of all gradients together."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def after_train_batch(self, state: State, logger: Logger) -> None:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), self.max_norm)


@dataclass(frozen=True)
class TextTraining(AdamW):
    """AdamW with what else is tuned for a small GPT.

    Args:
        initial_std: The standard deviation of initial embeddings and weights of linear layers.
        final_lr: The learning rate at the end, as a fraction of the peak.
        max_norm: The largest norm of all gradients together.
    """

    initial_std: float = 0.02
    final_lr: float = 0.0
    max_norm: float = 1.0

    def prepare(self, model: torch.nn.Module) -> None:
        """Initialize the matrices of a new network."""
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=self.initial_std)

    def callbacks(self) -> list[Callback]:
        """Return the clipping of gradients."""
        return [_ClipNorm(self.max_norm)]

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        falling = super().schedule()

        def multiplier(state: State, ssr: float = 1.0) -> float:
            elapsed, factor = state.get_elapsed_duration(), falling(state, ssr)
            assert elapsed is not None, "every run has a length"
            return factor if float(elapsed) < self.warmup else self.final_lr + (1 - self.final_lr) * factor

        return multiplier


@dataclass(frozen=True)
class MuonTraining(TextTraining):
    """Muon for the hidden matrices and AdamW for the other weights, the opponent of the public records.

    Args:
        initial_scale: Factor of the initial weights, in place of `initial_std`.
        projection_std: Another factor, for the last matrix of each branch; not 0, since Hyperball keeps norms.
        matrix_rate: The learning rate of the matrices, as a multiple of that of the other weights.
        momentum: The momentum of Muon.
    """

    initial_scale: float = 1.0
    projection_std: float = 0.5
    matrix_rate: float = 1.0
    momentum: float = 0.95

    def prepare(self, model: torch.nn.Module) -> None:
        """Scale the weights of a new network."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(self.initial_scale)
                if name.endswith(("attention_out.weight", "down.weight")):
                    parameter.mul_(self.projection_std)

    def algorithms(self) -> list[tuple[str, dict[str, Any]]]:
        """Return Muon."""
        return [("Muon", {"lr": self.lr * self.matrix_rate, "momentum": self.momentum})]


@dataclass(frozen=True)
class Text:
    """A text: its first 80 % to train on, then 10 % for validation and 10 % to test.

    Attributes:
        path: The file.
        tokenizer: The tokenizer of its characters.
        batch_size: Sequences per batch.
        seq_length: Characters per sequence.
    """

    path: Path
    tokenizer: Any
    batch_size: int
    seq_length: int

    def loaders(self, part: Part, seed: int, device: Device) -> tuple[Any, Any]:
        """Return loaders of the training part and of another part; see `Parts`."""
        shared: dict[str, Any] = {"tokenizer": self.tokenizer, "max_seq_len": self.seq_length, "device": device}
        train = build_text_dataloader(self.path, self.batch_size, part=_PARTS["train"], seed=seed, **shared)
        return train, build_text_dataloader(self.path, 64, part=_PARTS[part], is_train=False, **shared)

    def digest(self) -> str:
        """Return a checksum of the text and its division."""
        text = self.path.read_bytes()
        return hashlib.sha256(text + repr((_PARTS, self.batch_size, self.seq_length)).encode()).hexdigest()[:16]


def load(batch_size: int, seq_length: int, folder: Path | None) -> Text:
    """Return Tiny Shakespeare.

    Args:
        batch_size: Sequences per batch.
        seq_length: Characters per sequence.
        folder: The folder of the file; see `composer.recipes.tiny_lm.Data`.
    """
    found = tiny_lm.Data(folder).load()
    return Text(found.path, found.tokenizer, batch_size, seq_length)


def load_topics(batch_size: int, seq_length: int, folder: Path | None) -> Text:
    """Return the topics of Python's `help()`, half a million characters that come with Python.

    Args:
        batch_size: Sequences per batch.
        seq_length: Characters per sequence.
        folder: Not needed.
    """
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    path = cache_folder() / f"topics-{hashlib.sha256(text.encode()).hexdigest()[:16]}.txt"
    if not path.exists():
        write_atomically(path, text)
    return Text(path, CharTokenizer.from_text(text), batch_size, seq_length)


def learned_positions(width: int, layers: int, heads: int, text: Text) -> ComposerModel:
    """Return a GPT-2, whose positions are learned."""
    model: Any = create_gpt2(
        model_config={
            "vocab_size": text.tokenizer.vocab_size,
            "n_positions": text.seq_length,
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
        }
    )
    model.train_metrics = {}  # misleading on shortened sequences
    return model  # type: ignore[no-any-return]


def rotary_positions(width: int, layers: int, heads: int, text: Text) -> ComposerModel:
    """Return a network like GPT-2 with rotary position embeddings (RoPE, arXiv:2104.09864): GPT-NeoX in sequence."""
    network = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=text.tokenizer.vocab_size,
            max_position_embeddings=text.seq_length,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            use_parallel_residual=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    network.loss_type = "ForCausalLM"
    model: Any = HuggingFaceModel(network, None, use_logits=True, metrics=[LanguageCrossEntropy()])
    model.train_metrics = {}
    return model  # type: ignore[no-any-return]


def record_gpt(width: int, layers: int, heads: int, text: Text) -> ComposerModel:
    """Return the network of the public records; see `composer.recipes.gpt_record`."""
    return RecordGPT(text.tokenizer.vocab_size, width, layers, heads, projection_std=1.0)


def shakespeare() -> Task:
    """Return the task on characters, with variants of learned and of rotary positions."""
    sizes = (64, 2, 4)
    training, length = TextTraining(lr=1.2e-2, **_START), 128
    return Task(
        name="shakespeare",
        version=3,
        summary="A GPT of 0.1 million weights on the characters of Tiny Shakespeare.",
        data=partial(load, 16, length),
        variants={
            "learned": Variant(partial(learned_positions, *sizes), training, _SHORT_GRID),
            "rope": Variant(partial(rotary_positions, *sizes), training, _GRID),
        },
        metric=Metric("LanguageCrossEntropy", "nats per character", higher_is_better=False),
        steps=600,
        ladder=(0.5, 0.75, 1.0, 1.25),
        kind="tokens",
        base={"Alibi": "learned"},
        arguments={
            "Alibi": {"max_sequence_length": length, "train_sequence_length_scaling": 1.0},
            "SeqLengthWarmup": {"max_seq_length": length, "min_seq_length": 32},
        },
        judges_regularizers=False,
        not_judged={"GradientClipping": "it is part of plain training, which tunes it"},
    )


def _larger(name: str, summary: str, data: Callable[..., Text], grid: Mapping[str, Grid]) -> Task:
    """Return a task for a network of 0.6 million weights, which takes minutes, for plain and a stack."""
    # What the search of `shakespeare` found, but for the learning rate, warm-up and initialization that are tuned here.
    training = TextTraining(lr=6e-3, **_START)
    return Task(
        name=name,
        version=1,
        summary=summary,
        data=partial(data, 16, 128),
        variants={"rope": Variant(partial(rotary_positions, 128, 3, 4), training, grid)},
        metric=Metric("LanguageCrossEntropy", "nats per character", higher_is_better=False),
        steps=1_500,
        ladder=(0.6, 0.8, 1.0),
        kind="tokens",
        # What the searches of `shakespeare` found, for 2.5 times the steps.
        arguments={
            "Muon": {"momentum": 0.9},
            "ScheduleFree": {"warmup": "250ba"},
            "EMA": {"half_life": "25ba", "update_interval": "5ba"},
        },
        judges_regularizers=False,
    )


def shakespeare_larger() -> Task:
    """Return the task of `shakespeare` at ten times its scale: 6 times the weights, 2.5 times the steps."""
    summary = "A GPT of 0.6 million weights on the characters of Tiny Shakespeare."
    return _larger("shakespeare_larger", summary, load, _SHORT_GRID)


def python_help() -> Task:
    """Return the task on a text for which nothing was tuned but the learning rate."""
    summary = "The GPT of 0.6 million weights on the characters of the help of Python; only the learning rate is tuned."
    return _larger("python_help", summary, load_topics, {"lr": _GRID["lr"]})


_RECORDS_GRID = {
    "lr": Grid((4e-3, 8e-3)),
    "matrix_rate": Grid((0.5, 1.0, 2.0)),
    "warmup": Grid((0.05, 0.1, 0.3), low=0.01, high=0.9),
    "initial_scale": Grid((0.5, 1.0, 2.0)),
    "projection_std": Grid((0.1, 0.5), low=0.02, high=1.0),
    "weight_decay": Grid((0.03, 0.1)),
    "momentum": Grid((0.9, 0.95), high=0.99),
    "final_lr": Grid((0.0, 0.1), high=0.5),
    "beta2": Grid((0.95, 0.99), high=0.999),
    "max_norm": Grid((0.25, 1.0), high=8.0),
}


def _records(
    size: str, width: int, layers: int, steps: int, batch_size: int, tuned: Collection[str] = _RECORDS_GRID
) -> Task:
    training = MuonTraining(lr=4e-3, weight_decay=0.1, beta2=0.99, warmup=0.1)
    grid = {name: _RECORDS_GRID[name] for name in tuned}
    return Task(
        name=f"records_{size}",
        version=1,
        summary=f"The GPT of the public records with {size} size on Tiny Shakespeare; plain is Muon with AdamW.",
        data=partial(load, batch_size, 128),
        variants={"muon": Variant(partial(record_gpt, width, layers, 4), training, grid)},
        metric=Metric("LanguageCrossEntropy", "nats per character", higher_is_better=False),
        steps=steps,
        ladder=(0.7, 0.85, 1.0),
        kind="tokens",
        algorithms={"TwoMomenta": "Muon", "RowFloor": "Muon", "SOAPMuon": "Muon", "TailReadout": "EMA"},
        arguments={
            "TwoMomenta": {
                "momentum": (0.85, 0.98),
                "momentum_weights": (0.4385, 0.5615),
                "momentum_start": "0.25dur",
            },
            "SOAPMuon": {"soap_beta": 0.9, "soap_frequency": 10},
            "TailReadout": {"update_interval": "1ba", "ema_start": "0.8dur", "half_life": "20ba", "blend": 0.6},
        },
        grids={
            "SOAPMuon": {},  # plain has tuned the momentum
            "RowFloor": {"row_floor": Grid((0.1, 0.2, 0.3825))},
            "TailReadout": {"half_life": Grid(("10ba", "20ba", "40ba")), "blend": Grid((0.4, 0.6, 0.8), high=1.0)},
        },
        not_judged={"Muon": "it is part of plain training"},
        judges_regularizers=False,
    )


def records_small() -> Task:
    """Return the smallest of three sizes on which the levers of the public records are measured: 0.1M weights."""
    return _records("small", 64, 2, 600, 16)


def records_medium() -> Task:
    """Return the middle size, which tunes what depends on the size most: 0.6M weights, 1,500 steps."""
    return _records("medium", 128, 3, 1_500, 8, ("lr", "matrix_rate", "initial_scale", "warmup"))


def records_large() -> Task:
    """Return the largest size, which tunes the learning rate alone: 0.9M weights, 3,000 steps."""
    return _records("large", 160, 3, 3_000, 8, ("lr",))
