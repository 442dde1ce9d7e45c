"""What an algorithm did in a run, told from what was counted and logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from composer.core import Algorithm, Event, State
from composer.loggers import InMemoryLogger
from composer.recipes._watch import Watch

__all__ = ["Evidence", "describe_deeds"]


@dataclass(frozen=True)
class Evidence:
    """What a run left behind.

    Attributes:
        state: The state at its end.
        memory: What was logged.
        watch: What was counted.
    """

    state: State
    memory: InMemoryLogger
    watch: Watch


def describe_deeds(algorithm: Algorithm, evidence: Evidence) -> str:
    """What an algorithm did, in a sentence with the numbers of the run.

    Args:
        algorithm: The algorithm.
        evidence: What its run left behind. Of several algorithms of one class it tells the sum.
    """
    name = type(algorithm).__name__
    acts = evidence.watch.acts.get(name, Counter())
    return _SENTENCES.get(name, _acted)(acts, evidence)


def _acted(acts: Counter[Event], evidence: Evidence) -> str:
    if not acts:
        return "did nothing"
    return "acted " + ", ".join(f"{_times(count)} at {event.value}" for event, count in acts.items())


def _blurred(acts: Counter[Event], evidence: Evidence) -> str:
    found = evidence.memory.hyperparameters
    convs, pools = found.get("blurpool/num_blurconv_layers", 0), found.get("blurpool/num_blurpool_layers", 0)
    return f"put a blur into {_count(convs, 'strided convolution')} and {_count(pools, 'max pooling')}"


def _laid_out(acts: Counter[Event], evidence: Evidence) -> str:
    weights = [parameter for parameter in evidence.state.model.parameters() if parameter.dim() == 4]
    done = sum(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    return f"stored {done} of {_count(len(weights), 'convolution')} channels last"


def _averaged(acts: Counter[Event], evidence: Evidence) -> str:
    updates = acts[Event.BATCH_END] or acts[Event.EPOCH_END]
    return f"averaged the weights {_times(updates)}, tested the averages {_times(acts[Event.EVAL_START])}"


def _smoothed(acts: Counter[Event], evidence: Evidence) -> str:
    return f"smoothed the targets of {_passes(acts[Event.BEFORE_LOSS], evidence)}"


def _mixed(acts: Counter[Event], evidence: Evidence) -> str:
    return f"mixed the images of {_passes(acts[Event.BEFORE_FORWARD], evidence)} in pairs"


def _resized(acts: Counter[Event], evidence: Evidence) -> str:
    logged = [evidence.memory.data.get(f"progressive_resizing/{side}", []) for side in ("height", "width")]
    sizes = Counter((height, width) for (_, height), (_, width) in zip(*logged, strict=True))
    parts = [f"{_count(count, 'batch')} at {height}x{width}" for (height, width), count in sizes.items()]
    return "trained " + ", ".join(parts)


def _looked_around(acts: Counter[Event], evidence: Evidence) -> str:
    steps = evidence.state.timestamp.batch.value
    return f"looked for the worst point nearby in {evidence.watch.passes - steps} of {_count(steps, 'step')}"


def _clipped(acts: Counter[Event], evidence: Evidence) -> str:
    return f"clipped the gradients of {_count(acts[Event.AFTER_TRAIN_BATCH], 'batch')}"


def _cut(acts: Counter[Event], evidence: Evidence) -> str:
    return f"cut squares out of the images of {_count(acts[Event.AFTER_DATALOADER], 'batch')}"


def _mixed_by_cutting(acts: Counter[Event], evidence: Evidence) -> str:
    return f"exchanged squares between the images of {_passes(acts[Event.BEFORE_FORWARD], evidence)}"


def _frozen(acts: Counter[Event], evidence: Evidence) -> str:
    counts = [int(count) for _, count in evidence.memory.data.get("layer_freezing/layers_frozen", [])]
    return f"trained {_count(counts[-1] if counts else 0, 'layer')} no more at the end"


def _shortened(acts: Counter[Event], evidence: Evidence) -> str:
    return f"made the training {_count(evidence.state.timestamp.batch.value, 'batch')} long"


def _selected(acts: Counter[Event], evidence: Evidence) -> str:
    return f"trained on the samples that it chose of {_count(acts[Event.AFTER_DATALOADER], 'batch')}"


def _excited(acts: Counter[Event], evidence: Evidence) -> str:
    found = evidence.memory.hyperparameters.get("squeeze_excite/num_squeeze_excite_layers", 0)
    return f"put a squeeze and excitation behind {_count(found, 'convolution')}"


def _standardized(acts: Counter[Event], evidence: Evidence) -> str:
    found = evidence.memory.hyperparameters.get("WeightStandardization/num_weights_standardized", 0)
    return f"standardized the weights of {_count(found, 'convolution')}"


def _lengthened(acts: Counter[Event], evidence: Evidence) -> str:
    lengths = [int(length) for _, length in evidence.memory.data.get("seq_length_warmup/curr_seq_len", [])]
    if not lengths:
        return "did nothing"
    return f"trained on sequences of {lengths[0]} tokens first, and of {lengths[-1]} at the end"


def _biased(acts: Counter[Event], evidence: Evidence) -> str:
    return "replaced the position embeddings by biases of the attention" if acts[Event.INIT] else _acted(acts, evidence)


_SENTENCES: dict[str, Callable[[Counter[Event], Evidence], str]] = {
    "Alibi": _biased,
    "BlurPool": _blurred,
    "ChannelsLast": _laid_out,
    "CutMix": _mixed_by_cutting,
    "CutOut": _cut,
    "EMA": _averaged,
    "GradientClipping": _clipped,
    "LabelSmoothing": _smoothed,
    "LayerFreezing": _frozen,
    "MixUp": _mixed,
    "ProgressiveResizing": _resized,
    "SAM": _looked_around,
    "ScaleSchedule": _shortened,
    "SelectiveBackprop": _selected,
    "SeqLengthWarmup": _lengthened,
    "SqueezeExcite": _excited,
    "WeightStandardization": _standardized,
}


def _passes(count: int, evidence: Evidence) -> str:
    """A number of forward passes; said as batches where each had one."""
    return _count(count, "batch" if evidence.watch.passes == evidence.state.timestamp.batch.value else "pass")


def _times(count: int) -> str:
    return _count(count, "time")


def _count(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch', 'x')) else 's'}"
