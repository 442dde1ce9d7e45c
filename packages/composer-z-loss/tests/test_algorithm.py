"""`ZLoss` at its events, with the engine."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from composer.algorithms.z_loss import ZLoss, compute_z_loss
from composer.core import INTERPOLATES_LOSS, REPLACES_LOSS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleModel, SimpleTransformerModel, train_by_hand

LOGITS = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 2, -100, 1])

TOKENS = torch.tensor([[3, 1, -100, 2], [0, 5, 6, -100]])


class Recorder(LoggerDestination):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.seen.append(metrics)


def prepare(*algorithms: Algorithm, batch: Any, outputs: Any, loss: Any, model: Any = None) -> tuple[State, Engine]:
    state = State(model=model or SimpleModel(), max_duration="1ep", dataloader=[0], algorithms=algorithms)
    state.batch, state.outputs, state.loss = batch, outputs, loss
    return state, Engine(state)


def added(algorithm: ZLoss, batch: Any, outputs: Any, loss: Any = None, model: Any = None) -> Any:
    """Return the loss before the backward pass."""
    loss = torch.tensor(1.0) if loss is None else loss
    state, engine = prepare(algorithm, batch=batch, outputs=outputs, loss=loss, model=model)
    engine.run_event("before_backward")
    return state.loss


@pytest.mark.parametrize(
    "outputs",
    [
        LOGITS,
        {"logits": LOGITS, "loss": torch.tensor(0.0)},
        UserDict(logits=LOGITS),
        SimpleNamespace(logits=LOGITS),
        (torch.tensor(0.0), LOGITS, torch.zeros(4, 8)),
        [LOGITS],
    ],
)
def test_the_term_of_the_logits_is_added_to_the_loss(outputs: Any) -> None:
    expected = 1 + compute_z_loss(LOGITS, LABELS, 0.5)

    torch.testing.assert_close(expected, added(ZLoss(0.5), (None, LABELS), outputs))
    torch.testing.assert_close(expected, added(ZLoss(0.5), {"labels": LABELS}, outputs))
    torch.testing.assert_close(expected, added(ZLoss(0.5, target_key="y"), {"y": LABELS}, outputs))


def test_masked_tokens_do_not_count() -> None:
    mask = torch.tensor([1, 0, 1, 1])
    actual = added(ZLoss(0.5, mask_key="mask"), {"labels": LABELS, "mask": mask}, LOGITS)

    torch.testing.assert_close(1 + compute_z_loss(LOGITS, LABELS, 0.5, mask=mask), actual)


def test_logits_without_tokens_cannot_be_shifted() -> None:
    message = r"`shift_labels` must be False for logits without a dimension of tokens, got True .* \(4, 3\)"
    with pytest.raises(ValueError, match=message):
        added(ZLoss(shift_labels=True), (None, LABELS), LOGITS)


def test_labels_are_shifted_as_those_of_the_model_or_as_requested() -> None:
    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    tokens[0, 2] = tokens[:, 0] = -100
    mask = (torch.arange(5) < 4).expand(2, 5)
    batch = {"labels": tokens, "mask": mask}
    plain = 1 + compute_z_loss(logits, tokens, 0.5)
    shifted = 1 + compute_z_loss(logits[:, :-1], tokens[:, 1:], 0.5)
    causal = SimpleTransformerModel()
    causal.shift_labels = True  # type: ignore[assignment]

    torch.testing.assert_close(plain, added(ZLoss(0.5), batch, logits))
    torch.testing.assert_close(shifted, added(ZLoss(0.5), batch, logits, model=causal))
    torch.testing.assert_close(plain, added(ZLoss(0.5, shift_labels=False), batch, logits, model=causal))
    torch.testing.assert_close(shifted, added(ZLoss(0.5, shift_labels=True), batch, logits))
    torch.testing.assert_close(
        1 + compute_z_loss(logits[:, :-1], tokens[:, 1:], 0.5, mask=mask[:, 1:]),
        added(ZLoss(0.5, shift_labels=True, mask_key="mask"), batch, logits),
    )


@pytest.mark.parametrize("return_dict", [True, False])
def test_the_positions_are_those_of_the_loss_of_a_language_model_of_transformers(return_dict: bool) -> None:
    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2, eos_token_id=0, bos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    outputs = model(TOKENS.clamp(min=0), labels=TOKENS, return_dict=return_dict)
    loss, logits = (outputs.loss, outputs.logits) if return_dict else outputs[:2]
    squares = logits.logsumexp(-1)[:, :-1].square()
    counts = TOKENS[:, 1:] >= 0
    expected = loss + 0.5 * squares[counts].mean()
    cross_entropies = F.cross_entropy(logits[:, :-1].mT, TOKENS[:, 1:].clamp(min=0), reduction="none")

    torch.testing.assert_close(loss, cross_entropies[counts].mean())
    torch.testing.assert_close(expected, added(ZLoss(0.5, shift_labels=True), {"labels": TOKENS}, outputs, loss))


def test_every_form_of_loss_keeps_its_form() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    term = compute_z_loss(LOGITS, LABELS, 0.5)
    batch = (None, LABELS)

    assert {"total": 1 + term, "other": two} == added(ZLoss(0.5), batch, LOGITS, {"total": one, "other": two})
    assert {"a": one, "b": two, "z_loss": term} == added(ZLoss(0.5), batch, LOGITS, {"a": one, "b": two})
    assert (one, two, term) == added(ZLoss(0.5), batch, LOGITS, [one, two])
    with pytest.raises(TypeError, match="to add `z_loss` to it, got float"):
        added(ZLoss(0.5), batch, LOGITS, 1.0)


def test_it_trains_like_a_loop_that_adds_the_function() -> None:
    generator = torch.Generator().manual_seed(5)
    batches = [
        (torch.randn(8, 1, 4, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator)) for _ in range(3)
    ]
    expected, actual = SimpleModel(), SimpleModel()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        logits = expected((x, y))
        (F.cross_entropy(logits, y) + compute_z_loss(logits, y, 0.5)).backward()
        optimizer.step()
    optimizer = torch.optim.SGD(actual.parameters(), lr=0.1)
    state = State(model=actual, max_duration="3ba", dataloader=batches, optimizers=optimizer, algorithms=ZLoss(0.5))
    train_by_hand(state, batches)

    for parameter, reference in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(reference, parameter)


def test_the_term_of_the_whole_batch_is_logged_once() -> None:
    """Also if its microbatches have different numbers of labels, and after a pass that ran out of memory."""
    algorithm, recorder = ZLoss(0.5), Recorder()
    state, _ = prepare(algorithm, batch=None, outputs=None, loss=None)
    logger = Logger(state, [recorder])
    for interrupted in (True, False):
        algorithm.apply(Event.BEFORE_TRAIN_BATCH, state, logger)
        for part in (slice(0, 1), slice(1, 4)):
            state.batch, state.outputs, state.loss = (None, LABELS[part]), LOGITS[part], torch.tensor(1.0)
            algorithm.apply(Event.BEFORE_BACKWARD, state, logger)
            if interrupted:
                break
    algorithm.apply(Event.AFTER_TRAIN_BATCH, state, logger)

    assert 1 == len(recorder.seen)
    assert compute_z_loss(LOGITS, LABELS, 0.5).item() == pytest.approx(float(recorder.seen[0]["z_loss/loss"]))
    assert compute_z_loss(LOGITS, LABELS, 1.0).item() == pytest.approx(
        float(recorder.seen[0]["z_loss/mean_squared_log_z"])
    )


class Halving(Algorithm):
    """A method that interpolates the loss right before the backward pass."""

    events = frozenset({Event.BEFORE_BACKWARD})
    placement = Placement(provides={INTERPOLATES_LOSS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.loss = state.loss / 2


@pytest.mark.parametrize("reverse", [False, True])
def test_the_term_is_not_interpolated(reverse: bool) -> None:
    algorithms: list[Algorithm] = [ZLoss(0.5), Halving()]
    state, engine = prepare(
        *(reversed(algorithms) if reverse else algorithms), batch=(None, LABELS), outputs=LOGITS, loss=torch.tensor(1.0)
    )
    engine.run_event("before_backward")

    torch.testing.assert_close(0.5 + compute_z_loss(LOGITS, LABELS, 0.5), state.loss)


class Fused(Algorithm):
    """A method that computes the loss without logits."""

    placement = Placement(provides={REPLACES_LOSS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


def test_a_loss_without_logits_is_refused() -> None:
    state = State(model=SimpleModel(), rank_zero_seed=0, algorithms=[ZLoss(), Fused()])
    with pytest.raises(ValueError, match=r"ZLoss.*Fused|Fused.*ZLoss"):
        Engine(state).run_event("init")


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`coefficient` must not be negative, got -0.1"):
        ZLoss(-0.1)
    with pytest.raises(ValueError, match=r"`dim` must be -1, 1 or None, got 2"):
        ZLoss(dim=2)
    with pytest.raises(TypeError, match=r"`shift_labels` must be True or False, got 'no'"):
        ZLoss(shift_labels="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`ignore_index` must be an integer, got 0.5"):
        ZLoss(ignore_index=0.5)  # type: ignore[arg-type]


def test_outputs_without_logits_and_labels_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`ZLoss` needs logits: .* got dict"):
        added(ZLoss(), (None, LABELS), {"hidden": LOGITS})
    with pytest.raises(TypeError, match=r"`target_key` must be the position of a tensor of the batch, got 1.* a list"):
        added(ZLoss(), (None, [0, 1]), LOGITS)
    with pytest.raises(TypeError, match=r"`mask_key` must be the position of a tensor of the batch, got 0.*NoneType"):
        added(ZLoss(mask_key=0), (None, LABELS), LOGITS)
    with pytest.raises(KeyError, match=r"has no 1"):
        added(ZLoss(), {"answer": LABELS}, LOGITS)
