"""The recipes of `composer-train tiny_lm`: a small GPT-2 on the characters of Tiny Shakespeare."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer.algorithms.alibi import Alibi
from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.muon import Muon
from composer.algorithms.scale_schedule import ScaleSchedule
from composer.algorithms.seq_length_warmup import SeqLengthWarmup
from composer.datasets import CharTokenizer, build_text_dataloader
from composer.datasets.lm import build_token_dataloader, read_tokens
from composer.devices import Device
from composer.models import ComposerModel
from composer.recipes._images import per_process
from composer.recipes._recipe import AdamW, Metric, Task, check_at_least, find_data
from composer.utils import dist

_SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_NAMES = ("tinyshakespeare.txt", "text/tinyshakespeare.txt")
_TRAIN = 0.9  # the fraction of the text to train on; the rest is for testing
_EVAL_BATCH_SIZE = 64


@dataclass(frozen=True)
class Data:
    """Tiny Shakespeare, or any other text: its first 90% to train on, the rest to test.

    Args:
        data: A text file in UTF-8, a folder that holds tinyshakespeare.txt, or tokens in a NumPy file (*.npy; see
            `composer.datasets.lm.read_tokens`), which are "characters" below. None: the environment variable
            COMPOSER_DATA.
        characters: Use only this many characters of the text, from the first. None: all.
        validation_characters: Hold out this many characters from the end of the training part, and test on them instead
            of the test part, for choosing hyperparameters. None: use the test part.
        batch_size: Sequences per training batch. An incomplete last batch is dropped.
        seq_length: Characters per sequence.
        vocab_size: Number of tokens of a NumPy file. None: the greatest in the file, and one.
    """

    data: Path | None = None
    characters: int | None = None
    validation_characters: int | None = None
    batch_size: int = 8
    seq_length: int = 256
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        least = {"characters": 1, "validation_characters": 1, "batch_size": 1, "seq_length": 2, "vocab_size": 1}
        for name, value in least.items():
            check_at_least(name, getattr(self, name), value)

    def load(self) -> Text:
        """Read the text.

        Raises:
            FileNotFoundError: It does not exist; the message has the command that downloads it.
            ValueError: It has fewer characters than requested, or is shorter than a batch.
        """
        path = _find(find_data(self.data))
        tokenizer = None
        if path.suffix == ".npy":
            tokens = read_tokens(path)
            length, greatest = len(tokens), int(tokens.max(initial=0))
            vocab_size = greatest + 1 if self.vocab_size is None else self.vocab_size
            if greatest >= vocab_size:
                raise ValueError(f"`vocab_size` must be above {greatest}, a token of {str(path)!r}, got {vocab_size}.")
        else:
            text = path.read_text(encoding="utf-8")
            tokenizer = CharTokenizer.from_text(text)
            length, vocab_size = len(text), tokenizer.vocab_size
            if self.vocab_size is not None:
                raise ValueError(f"`vocab_size` must be None for a text, got {self.vocab_size} for {str(path)!r}.")
        if self.characters is not None and self.characters > length:
            raise ValueError(
                f"`characters` must be at most {length:,}, the length of {str(path)!r}, got {self.characters}."
            )
        return Text(path, tokenizer, vocab_size, length, self)


@dataclass(frozen=True)
class Text:
    """A loaded text.

    Attributes:
        path: The file.
        tokenizer: The tokenizer of its characters; None for a file of tokens.
        vocab_size: Number of distinct characters, or of tokens.
        length: Number of characters, or of tokens.
        options: The hyperparameters.
    """

    path: Path
    tokenizer: CharTokenizer | None
    vocab_size: int
    length: int
    options: Data

    def __post_init__(self) -> None:
        per_process(self.batch_size)
        if self.num_train < self.batch_size or self.num_test < 1:
            raise ValueError(
                f"The text must have a batch of {self.batch_size} sequences of {self.options.seq_length} characters to "
                f"train on, and one to test, got {self.num_train} and {self.num_test}. Use more text, or a smaller "
                f"`batch_size` or `seq_length`."
            )

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def batch_size(self) -> int:
        """Sequences per training batch, summed over all processes."""
        return self.options.batch_size

    @property
    def num_train(self) -> int:
        """Number of training sequences."""
        return self._count(*self._parts[0])

    @property
    def num_test(self) -> int:
        """Number of test sequences."""
        return self._count(*self._parts[1])

    @property
    def _parts(self) -> tuple[tuple[float, float], tuple[float, float]]:
        used = (self.options.characters or self.length) / self.length
        end, held_out = _TRAIN * used, self.options.validation_characters
        if held_out is None:
            return (0.0, end), (end, used)
        begin = max(end - held_out / self.length, 0.0)
        return (0.0, begin), (begin, end)

    def _count(self, begin: float, end: float) -> int:
        return (round(end * self.length) - round(begin * self.length)) // self.options.seq_length

    def describe(self) -> str:
        """Return one line about the text and its split."""
        kind = "tokens" if self.tokenizer is None else "characters"
        return (
            f"{self.name}: {self.num_train:,} sequences to train on, {self.num_test:,} to test, of "
            f"{self.options.seq_length} {kind}, {self.vocab_size:,} of them distinct"
        )

    def loaders(self, seed: int, device: Device) -> tuple[Any, Any]:
        """Return loaders for training and testing on a device.

        Args:
            seed: Seed of the order of the training sequences.
            device: The device that stores all tokens.
        """
        build: Callable[..., Any] = build_token_dataloader
        if self.tokenizer is not None:
            build = partial(build_text_dataloader, tokenizer=self.tokenizer)
        shared: dict[str, Any] = {"max_seq_len": self.options.seq_length, "device": device}
        train, test = self._parts
        processes = dist.get_world_size()
        eval_batch_size = max(1, _EVAL_BATCH_SIZE // processes) * processes
        return (
            build(self.path, self.batch_size, part=train, seed=seed, **shared),
            build(self.path, eval_batch_size, part=test, is_train=False, **shared),
        )


@dataclass(frozen=True)
class Network:
    """A GPT-2.

    Args:
        width: Size of the embeddings.
        layers: Number of layers.
        heads: Attention heads per layer; a divisor of the width.
        dropout: Probability of all dropouts, in [0, 1).
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads"):
            check_at_least(name, getattr(self, name), 1)
        if self.width % self.heads:
            raise ValueError(f"`width` must be a multiple of `heads`, got {self.width} and {self.heads}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be in [0, 1), got {self.dropout!r}.")

    def build(self, dataset: Text) -> ComposerModel:
        """Return a new network for the characters of a text."""
        from composer.models import create_gpt2  # imports transformers, which takes seconds

        config = {
            "vocab_size": dataset.vocab_size,
            "n_positions": dataset.options.seq_length,
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": self.heads,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), self.dropout),
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
        }
        with _without_tokenizer_warning():
            model = create_gpt2(model_config=config)
        model.train_metrics = {}  # misleading on shortened sequences
        return model


@contextmanager
def _without_tokenizer_warning() -> Iterator[None]:
    """Mute the advice to pass a tokenizer to the model: the character tokenizer is not a transformers tokenizer."""
    log = logging.getLogger("composer.models.huggingface")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _find(root: Path) -> Path:
    if root.is_file():
        return root
    candidates = [root / name for name in _NAMES]
    for path in candidates:
        if path.is_file():
            return path
    places = " and ".join(repr(str(path)) for path in candidates)
    command = f"curl -Lo {candidates[0]} {_SOURCE}"
    raise FileNotFoundError(f"Tiny Shakespeare was not found: looked for {places}. To get it, run `{command}`.")


TASK = Task(
    name="tiny_lm",
    summary=(
        "Train a GPT-2 of 0.1 million weights on Tiny Shakespeare, character by character, first plainly and then with "
        "composed algorithms that get to the same loss sooner, and compare."
    ),
    data=Data(),
    network=Network(),
    training=AdamW(epochs=6, lr=8e-3),
    metrics=(
        Metric("LanguageCrossEntropy", "nats per character", higher_is_better=False),
        Metric("LanguagePerplexity", "perplexity", digits=3, higher_is_better=False),
    ),
    algorithms={
        "alibi": Alibi,
        "ema": EMA,
        "gradient_clipping": GradientClipping,
        "muon": Muon,
        "scale_schedule": ScaleSchedule,
        "seq_length_warmup": SeqLengthWarmup,
    },
    chosen=("gradient_clipping", "muon", "scale_schedule"),
    tuned={
        "alibi": {"train_sequence_length_scaling": 1.0},
        "ema": {"half_life": "20ba"},
        "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
        "scale_schedule": {"ratio": 0.7},
        "seq_length_warmup": {"duration": 0.2, "min_seq_length": 64},
    },
    fitted=lambda data: {
        "alibi": {"max_sequence_length": data.seq_length},
        "seq_length_warmup": {"max_seq_length": data.seq_length},
    },
)
"""The defaults of `composer-train tiny_lm`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
