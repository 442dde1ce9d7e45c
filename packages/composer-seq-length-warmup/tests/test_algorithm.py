"""`SeqLengthWarmup` over a run, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.seq_length_warmup import SeqLengthWarmup, seq_length_warmup
from composer.core import CHANGES_LENGTH, RESHAPES_SEQUENCES, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleTransformerModel, deep_compare


class Records(LoggerDestination):
    """Logger that stores the metrics of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(metrics)


def make_batch(rows: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


def make(
    algorithms: Any, max_duration: str = "20ba", batches: int = 10, model: torch.nn.Module | None = None
) -> tuple[State, Engine]:
    state = State(
        model=SimpleTransformerModel() if model is None else model,
        max_duration=max_duration,
        dataloader=[0] * batches,
        algorithms=algorithms,
        callbacks=Records(),
    )
    engine = Engine(state)
    engine.run_event("init")
    return state, engine


def lengths(algorithm: SeqLengthWarmup, steps: int, max_duration: str = "20ba", batches: int = 10) -> list[int]:
    state, engine = make(algorithm, max_duration, batches)
    found = []
    for _ in range(steps):
        state.batch = make_batch()
        engine.run_event("after_dataloader")
        found.append(state.batch["input_ids"].shape[1])
        state.timestamp = state.timestamp.to_next_batch(samples=4, tokens=128)
        if int(state.timestamp.batch) % batches == 0:
            state.timestamp = state.timestamp.to_next_epoch()
    logged = [call["seq_length_warmup/curr_seq_len"] for call in state.callbacks[0].calls]  # type: ignore[attr-defined]
    assert found == logged
    return found


def test_lengths_grow_in_the_warmup() -> None:
    algorithm = SeqLengthWarmup(0.5, 8, 32, 8)

    assert lengths(algorithm, 20) == [8] * 3 + [16] * 3 + [24] * 3 + [32] * 11
    assert lengths(algorithm, 20, "2ep") == lengths(algorithm, 20)


def test_two_batches_of_which_one_is_warmup() -> None:
    assert lengths(SeqLengthWarmup(0.5, 8, 16), 2, "2ba") == [8, 16]
    assert lengths(SeqLengthWarmup(0.5, 8, 16), 2, "1ep", 2) == [8, 16]


def test_a_last_step_that_is_not_whole_is_taken() -> None:
    assert lengths(SeqLengthWarmup(0.2, 8, 29, 10), 8) == [8, 8, 18, 18, 28, 28, 29, 29]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (SeqLengthWarmup(0.0, 8, 32), [32] * 8),
        (SeqLengthWarmup(0.2, 8, 32, 4), [8, 12, 20, 24, 32, 32, 32, 32]),
        (SeqLengthWarmup(0.2, 8, 10, 4), [8, 8, 8, 8, 10, 10, 10, 10]),
        (SeqLengthWarmup(0.2, 16, 16), [16] * 8),
        (SeqLengthWarmup(0.0, 8, 8), [8] * 8),
        (SeqLengthWarmup(0.01, 8, 32), [32] * 8),
    ],
)
def test_warmups_without_whole_steps(algorithm: SeqLengthWarmup, expected: list[int]) -> None:
    assert expected == lengths(algorithm, 8)


@pytest.mark.parametrize("max_duration", ["80sp", "2560tok"])
def test_runs_in_samples_and_tokens_have_a_warmup_too(max_duration: str) -> None:
    """Make a run of 20 batches of 4 sequences of 32 tokens; half of it is warmup, with 3 steps in 10 batches."""
    expected = [8, 8, 8, 8, 16, 16, 16, 24, 24, 24] + [32] * 10

    assert expected == lengths(SeqLengthWarmup(0.5, 8, 32, 8), 20, max_duration)
    assert [32] * 4 == lengths(SeqLengthWarmup(0.0, 8, 32, 8), 4, max_duration)


def test_reshaped_batches_have_more_sequences() -> None:
    state, engine = make(SeqLengthWarmup(0.5, 8, 32, 8, truncate=False))
    state.batch = batch = make_batch()
    engine.run_event("after_dataloader")

    assert (16, 8) == state.batch["input_ids"].shape
    assert 16 == state.callbacks[0].calls[-1]["seq_length_warmup/curr_bs"]  # type: ignore[attr-defined]
    assert (4, 32) == batch["input_ids"].shape


def test_a_run_in_epochs_of_unknown_length_is_refused() -> None:
    state, engine = make(SeqLengthWarmup(), "2ep")
    state.set_dataloader(iter([0]), "train")
    state.batch = make_batch()
    with pytest.raises(RuntimeError, match=r"must know the number of batches .* '2ep', but the loader has no length"):
        engine.run_event("after_dataloader")


def test_batches_that_are_not_mappings_are_refused() -> None:
    state, engine = make(SeqLengthWarmup())
    state.batch = (torch.zeros(2, 8), torch.zeros(2))
    with pytest.raises(TypeError, match=r"`batch` must be a mapping of names to tensors, got tuple"):
        engine.run_event("after_dataloader")


class Reshapes(Algorithm):
    """A method that deals out tokens itself."""

    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={RESHAPES_SEQUENCES})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = state.batch["input_ids"].shape[1]


@pytest.mark.parametrize("reverse", [False, True])
def test_sequences_are_reshaped_before_they_are_truncated_whatever_the_order_of_the_list(reverse: bool) -> None:
    reshapes = Reshapes()
    algorithms: list[Algorithm] = [SeqLengthWarmup(), reshapes]
    state, engine = make(algorithms[::-1] if reverse else algorithms)
    state.batch = make_batch()
    engine.run_event("after_dataloader")

    assert 32 == reshapes.seen
    assert CHANGES_LENGTH in SeqLengthWarmup.placement.provides


def test_the_pass_at_full_length_leaves_no_trace() -> None:
    model = SimpleTransformerModel(p=0.5)
    model.register_buffer("count", count := torch.zeros(()))

    def counted(*_: Any) -> None:
        count.add_(1)

    model.layer.register_forward_hook(counted)
    state, _ = make(SeqLengthWarmup(), model=model)
    seen = []
    model.embedding.register_forward_hook(lambda *args: seen.append(args[1][0].shape))
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    seq_length_warmup._reserve_memory(state, make_batch_with(random))
    state.device_train_microbatch_size = 3
    seq_length_warmup._reserve_memory(state, make_batch_with(random))

    deep_compare(before, model.state_dict())
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert seen == [(4, 32), (3, 32)]


def make_batch_with(random: torch.Tensor) -> dict[str, torch.Tensor]:
    batch = make_batch()
    torch.set_rng_state(random)
    return batch


@pytest.mark.parametrize(("fitting", "expected"), [(4, None), (2, 2), (1, 1)])
def test_a_microbatch_that_does_not_fit_is_halved(
    fitting: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = make(SeqLengthWarmup())
    state.auto_microbatching = True

    def run(state: State, batch: Any) -> None:
        if (state.device_train_microbatch_size or 4) > fitting:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(seq_length_warmup, "_run_forward_backward", run)
    seq_length_warmup._reserve_memory(state, make_batch())

    assert expected == state.device_train_microbatch_size


def test_an_example_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(state: State, batch: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(seq_length_warmup, "_run_forward_backward", run)
    state, _ = make(SeqLengthWarmup())
    with pytest.raises(torch.OutOfMemoryError):
        seq_length_warmup._reserve_memory(state, make_batch())
    state.auto_microbatching = True
    with pytest.raises(RuntimeError, match="Not even one example of full length fits"):
        seq_length_warmup._reserve_memory(state, make_batch())


@pytest.mark.parametrize("kind", [dict, list])
def test_several_losses_are_summed(kind: Any) -> None:
    class Several(SimpleTransformerModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            losses = [super().loss(outputs, batch), outputs.mean()]
            return losses if kind is list else {"a": losses[0], "b": losses[1]}

    seq_length_warmup._reserve_memory(make(SeqLengthWarmup(), model=Several())[0], make_batch())


def test_it_happens_once_in_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    monkeypatch.setattr(seq_length_warmup, "_reserve_memory", lambda state, batch: calls.append(batch["labels"].shape))
    state, engine = make(SeqLengthWarmup(max_seq_length=16))
    for name in ("cpu", "gpu", "gpu"):
        if name == "gpu" and not calls:
            state.algorithms[0]._memory_is_reserved = False  # type: ignore[attr-defined]
        monkeypatch.setattr(type(state.device), "name", name)
        state.batch = make_batch()
        engine.run_event("after_dataloader")

    assert [(4, 16)] == calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"duration": 1.5}, r"`duration` must be in \[0, 1\], got 1\.5"),
        ({"min_seq_length": 16, "max_seq_length": 8}, r"must not be less than `min_seq_length`, got 8 and 16"),
        ({"min_seq_length": 0}, r"`min_seq_length` must be at least 1, got 0"),
        ({"step_size": 0}, r"`step_size` must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeqLengthWarmup(**arguments)
