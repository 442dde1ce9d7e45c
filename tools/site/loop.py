"""The diagram of the training loop: boxes in boxes, with each event and the algorithms that act there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from composer.core import Algorithm, Event


@dataclass(frozen=True)
class Loop:
    """A part of the training loop that repeats.

    Attributes:
        title: What it repeats for.
        parts: Its events, loops, and notes, in order.
    """

    title: str
    parts: tuple[Event | Loop | str, ...]

    def events(self) -> Iterator[Event]:
        """Yield its events and those of inner loops."""
        for part in self.parts:
            if isinstance(part, Event):
                yield part
            elif isinstance(part, Loop):
                yield from part.events()


_MICROBATCH = Loop(
    "for each microbatch",
    (
        Event.BEFORE_FORWARD,
        "outputs = model(batch)",
        Event.AFTER_FORWARD,
        Event.BEFORE_LOSS,
        "loss = model.loss(outputs, batch)",
        Event.AFTER_LOSS,
        Event.BEFORE_BACKWARD,
        "loss.backward()",
        Event.AFTER_BACKWARD,
    ),
)
_BATCH = Loop(
    "for each batch",
    (
        Event.BEFORE_DATALOADER,
        "batch = next(loader)",
        Event.AFTER_DATALOADER,
        Event.BATCH_START,
        Event.BEFORE_TRAIN_BATCH,
        _MICROBATCH,
        Event.AFTER_TRAIN_BATCH,
        "optimizer.step(), scheduler.step()",
        Event.BATCH_END,
        "evaluation, if it is due",
        Event.BATCH_CHECKPOINT,
    ),
)
_EPOCH = Loop(
    "for each epoch",
    (
        Event.EPOCH_START,
        _BATCH,
        Event.EPOCH_END,
        "evaluation, if it is due",
        Event.EPOCH_CHECKPOINT,
    ),
)
FIT = Loop(
    "a run",
    (
        Event.INIT,
        Event.BEFORE_LOAD,
        "the checkpoint, if there is one",
        Event.AFTER_LOAD,
        Event.FIT_START,
        Loop(
            "for each iteration: the whole run, unless its length is set",
            (Event.ITERATION_START, _EPOCH, Event.ITERATION_END, Event.ITERATION_CHECKPOINT),
        ),
        Event.FIT_END,
    ),
)
"""A run of `Trainer.fit`."""
EVALUATION = Loop(
    "an evaluation",
    (
        "in a run:",
        Event.EVAL_BEFORE_ALL,
        "or by Trainer.eval:",
        Event.EVAL_STANDALONE_START,
        Loop(
            "for each evaluator",
            (
                Event.EVAL_START,
                Loop(
                    "for each batch",
                    (
                        Event.EVAL_BATCH_START,
                        Event.EVAL_BEFORE_FORWARD,
                        "outputs = model.eval_forward(batch)",
                        Event.EVAL_AFTER_FORWARD,
                        "metrics are updated",
                        Event.EVAL_BATCH_END,
                    ),
                ),
                Event.EVAL_END,
            ),
        ),
        "in a run:",
        Event.EVAL_AFTER_ALL,
        "or by Trainer.eval:",
        Event.EVAL_STANDALONE_END,
    ),
)
"""Evaluations in a run and alone."""
PREDICTION = Loop(
    "Trainer.predict",
    (
        Event.PREDICT_START,
        Loop(
            "for each batch",
            (
                Event.PREDICT_BATCH_START,
                Event.PREDICT_BEFORE_FORWARD,
                "outputs = model.eval_forward(batch)",
                Event.PREDICT_AFTER_FORWARD,
                Event.PREDICT_BATCH_END,
            ),
        ),
        Event.PREDICT_END,
    ),
)
"""Predictions."""


def diagram(acting: Mapping[Event, Sequence[type[Algorithm]]], loop: Loop = FIT) -> str:
    """Return the diagram as HTML.

    Args:
        acting: The algorithms that act at each event.
        loop: What is drawn.
    """
    lines = [f'<div class="loop"><b>{escape(loop.title)}</b>']
    for part in loop.parts:
        if isinstance(part, Loop):
            lines.append(diagram(acting, part))
        elif isinstance(part, Event):
            names = ", ".join(sorted(cls.__name__ for cls in acting.get(part, ())))
            lines.append(f'<div class="event"><code>{part.name}</code><span>{names}</span></div>')
        else:
            lines.append(f'<div class="event"><i>{escape(part)}</i></div>')
    return "\n".join((*lines, "</div>"))
