"""Sentences about what an algorithm did in a run, from counts and logged values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from composer.core import Algorithm, Event, State
from composer.recipes._monitors import RunMemory, RunMonitor


@dataclass(frozen=True)
class FinishedRun:
    """The records of a run.

    Attributes:
        state: The final state.
        memory: The logged values.
        monitor: The counts.
    """

    state: State
    memory: RunMemory
    monitor: RunMonitor

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return int(self.state.timestamp.batch)

    def passes(self, count: int) -> str:
        """Return a number of forward passes as text; they are called batches if each batch had one pass."""
        return _count(count, "batch" if self.monitor.passes == self.steps else "pass")

    def hparam(self, key: str, noun: str) -> str:
        """Return a logged count as text, such as "3 convolutions"."""
        return _count(self.memory.hyperparameters.get(key, 0), noun)

    def logged(self, key: str) -> list[int]:
        """Return the logged values of a metric."""
        return [int(value) for value in self.memory.series(key)]


def describe_actions(algorithm: Algorithm, run: FinishedRun) -> str:
    """Return a sentence, without a subject, about what an algorithm did.

    Args:
        algorithm: The algorithm.
        run: The records of its run. Several algorithms of one class are counted together.
    """
    name = type(algorithm).__name__
    return SENTENCES.get(name, _count_events)(run.monitor.calls.get(name, Counter()), run)


def _count_events(calls: Counter[Event], run: FinishedRun) -> str:
    if not calls:
        return "did nothing"
    return "acted " + ", ".join(f"{_count(count, 'time')} at {event.value}" for event, count in calls.items())


def _channels_last(calls: Counter[Event], run: FinishedRun) -> str:
    weights = [parameter for parameter in run.state.model.parameters() if parameter.dim() == 4]
    converted = sum(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    return f"stored {converted} of {_count(len(weights), 'convolution')} channels last"


def _progressive_resizing(calls: Counter[Event], run: FinishedRun) -> str:
    heights, widths = (run.logged(f"progressive_resizing/{side}") for side in ("height", "width"))
    sizes = Counter(zip(heights, widths, strict=True))
    parts = [f"{_count(count, 'batch')} at {height}x{width}" for (height, width), count in sizes.items()]
    return "trained " + ", ".join(parts)


def _seq_length_warmup(calls: Counter[Event], run: FinishedRun) -> str:
    lengths = run.logged("seq_length_warmup/curr_seq_len")
    if not lengths:
        return "did nothing"
    return f"trained on sequences of {lengths[0]} tokens first, and of {lengths[-1]} at the end"


def _count(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch', 'x')) else 's'}"


SENTENCES: dict[str, Callable[[Counter[Event], FinishedRun], str]] = {
    "Alibi": lambda calls, run: (
        "replaced the position embeddings by biases of the attention"
        if calls[Event.INIT]
        else _count_events(calls, run)
    ),
    "AlternatingFlip": lambda calls, run: f"mirrored the images in turn in {_count(calls[Event.EPOCH_START], 'epoch')}",
    "BlurPool": lambda calls, run: (
        f"put a blur into {run.hparam('blurpool/num_blurconv_layers', 'strided convolution')} and "
        f"{run.hparam('blurpool/num_blurpool_layers', 'max pooling')}"
    ),
    "ChannelsLast": _channels_last,
    "ColOut": lambda calls, run: (
        f"dropped rows and columns of the images of {_count(calls[Event.AFTER_DATALOADER], 'batch')}"
    ),
    "CutMix": lambda calls, run: f"exchanged squares between the images of {run.passes(calls[Event.BEFORE_FORWARD])}",
    "CutOut": lambda calls, run: f"cut squares out of the images of {_count(calls[Event.AFTER_DATALOADER], 'batch')}",
    "EMA": lambda calls, run: (
        f"averaged the weights {_count(calls[Event.BATCH_END] or calls[Event.EPOCH_END], 'time')}, tested the averages "
        f"{_count(calls[Event.EVAL_START], 'time')}"
    ),
    "GradientClipping": lambda calls, run: (
        f"clipped the gradients of {_count(calls[Event.AFTER_TRAIN_BATCH], 'batch')}"
    ),
    "LabelSmoothing": lambda calls, run: f"smoothed the targets of {run.passes(calls[Event.BEFORE_LOSS])}",
    "LayerFreezing": lambda calls, run: (
        f"trained {_count([0, *run.logged('layer_freezing/layers_frozen')][-1], 'layer')} no more at the end"
    ),
    "MixUp": lambda calls, run: f"mixed the images of {run.passes(calls[Event.BEFORE_FORWARD])} in pairs",
    "Muon": lambda calls, run: f"orthogonalized the updates of {run.hparam('muon/num_matrices', 'hidden weight')}",
    "ProgressiveResizing": _progressive_resizing,
    "RandAugment": lambda calls, run: "added random augmentations to the training images",
    "SAM": lambda calls, run: (
        f"looked for the worst point nearby in {run.monitor.passes - run.steps} of {_count(run.steps, 'step')}"
    ),
    "ScaleSchedule": lambda calls, run: f"made the training {_count(run.steps, 'batch')} long",
    "SelectiveBackprop": lambda calls, run: (
        f"trained on the samples that it chose of {_count(calls[Event.AFTER_DATALOADER], 'batch')}"
    ),
    "SeqLengthWarmup": _seq_length_warmup,
    "SqueezeExcite": lambda calls, run: (
        "put a squeeze and excitation behind " + run.hparam("squeeze_excite/num_squeeze_excite_layers", "convolution")
    ),
    "StochasticDepth": lambda calls, run: "let residual blocks be left out at random",
    "TestTimeAugmentation": lambda calls, run: (
        f"averaged the scores of several views of {_count(calls[Event.EVAL_BEFORE_FORWARD], 'test batch')}"
    ),
    "WeightStandardization": lambda calls, run: (
        "standardized the weights of " + run.hparam("WeightStandardization/num_weights_standardized", "convolution")
    ),
    "Whitening": lambda calls, run: "set the first convolution to filters that whiten patches of the images",
}
