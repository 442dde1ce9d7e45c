"""Tests of the search for the microbatch size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_runs import TwoPass

from composer.core import Algorithm, Callback, DataSpec, Event, State
from composer.loggers import Logger
from composer.loop.generators import global_states
from composer.testing import SimpleModel, deep_compare
from composer.trainer import microbatch
from composer.trainer.trainer import _adjust_device_train_microbatch_size, _is_cuda_oom
from composer.utils.reproducibility import seed_context

MakeTrainer = Any  # the fixture's class, in conftest.py


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: device-side assert triggered", False),
        ("something else", False),
    ],
)
def test_out_of_memory_is_recognised(text: str, expected: bool) -> None:
    assert expected == _is_cuda_oom(RuntimeError(text))


def test_cudnn_without_workspace_counts_as_out_of_memory() -> None:
    text = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    with pytest.warns(UserWarning, match=r"treated as out of memory"):
        assert _is_cuda_oom(RuntimeError(text))


def test_the_microbatch_size_is_halved_down_to_one() -> None:
    state = State(model=torch.nn.Linear(1, 1), device_train_microbatch_size=5)
    for expected in (2, 1):
        with pytest.warns(RuntimeWarning, match=rf"is reduced from .* to {expected}"):
            _adjust_device_train_microbatch_size(state)
        assert expected == state.device_train_microbatch_size
    with pytest.raises(RuntimeError, match=r"does not fit even with `device_train_microbatch_size=1`"):
        _adjust_device_train_microbatch_size(state)


class Hungry(SimpleModel):
    """Runs out of memory with more than a number of samples."""

    limit = 2

    def forward(self, batch: Any) -> Any:
        if len(batch[0]) > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(batch)


def test_a_batch_that_does_not_fit_is_trained_in_smaller_parts(make_trainer: MakeTrainer) -> None:
    expected = make_trainer(model=SimpleModel(), device_train_microbatch_size=2)
    expected.fit()
    trainer = make_trainer(model=Hungry(), device_train_microbatch_size=4)
    trainer.state.auto_microbatching = True
    with pytest.warns(RuntimeWarning, match=r"`device_train_microbatch_size` is reduced from 4 to 2"):
        trainer.fit()

    assert 2 == trainer.state.device_train_microbatch_size
    deep_compare(dict(expected.state.model.named_parameters()), dict(trainer.state.model.named_parameters()))


def test_a_search_leaves_no_trace_in_statistics_and_random_numbers(make_trainer: MakeTrainer) -> None:
    class Noisy(Hungry):
        def __init__(self) -> None:
            with seed_context(0):
                super().__init__(num_features=1)
            self.noise = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Dropout(0.3))

        def forward(self, batch: Any) -> Any:
            return super().forward((self.noise(batch[0]), batch[1]))

    expected = make_trainer(model=Noisy(), device_train_microbatch_size=2)
    expected.fit()
    trainer = make_trainer(model=Noisy(), device_train_microbatch_size=4)
    trainer.state.auto_microbatching = True
    with pytest.warns(RuntimeWarning, match=r"is reduced from 4 to 2"):
        trainer.fit()

    deep_compare(expected.state.model.state_dict(), trainer.state.model.state_dict())


def test_a_search_within_a_closure_that_is_scaled_goes_on(make_trainer: MakeTrainer) -> None:
    def train(limit: int, size: int) -> dict[str, Any]:
        with seed_context(0):
            model = Hungry()
        model.limit = limit
        trainer = make_trainer(
            model=model,
            optimizers=TwoPass(model.parameters(), lr=0.1),
            algorithms=FailsOnce(),
            precision="amp_fp16",
            device_train_microbatch_size=size,
        )
        trainer.state.auto_microbatching = True
        trainer.fit()
        return dict(model.named_parameters())

    class FailsOnce(Algorithm):
        """Runs out of memory with unscaled gradients at hand."""

        events = frozenset({Event.AFTER_TRAIN_BATCH})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            if state.device_train_microbatch_size == 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.warns(RuntimeWarning, match=r"is reduced from 4 to 2"):
        found = train(4, 4)
    deep_compare(train(4, 2), found)


def test_other_cuda_errors_are_not_searched_around(make_trainer: MakeTrainer) -> None:
    class Broken(SimpleModel):
        def forward(self, batch: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    trainer = make_trainer(model=Broken())
    trainer.state.auto_microbatching = True
    with pytest.raises(RuntimeError, match=r"Encountered non-addressable cuda error while using auto"):
        trainer.fit()


@pytest.mark.filterwarnings("ignore:`device_eval_microbatch_size='auto'`")
def test_evaluation_splits_what_does_not_fit_and_counts_every_sample_once(make_trainer: MakeTrainer) -> None:
    from composer.core import Evaluator

    metrics = make_trainer.model().get_metrics(is_train=False)
    expected = make_trainer(eval_dataloader=make_trainer.loader(14, batch_size=7))
    expected.eval()
    evaluator = Evaluator(
        label="eval", dataloader=make_trainer.loader(14, batch_size=7), device_eval_microbatch_size="auto"
    )
    trainer = make_trainer(model=Hungry(eval_metrics=metrics), eval_dataloader=evaluator)
    with pytest.warns(RuntimeWarning, match=r"`device_eval_microbatch_size` is reduced from"):
        trainer.eval()

    assert 1 == evaluator.device_eval_microbatch_size
    assert expected.state.eval_metric_values == trainer.state.eval_metric_values


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`device_train_microbatch_size='auto'`")
def test_the_search_finds_a_size_that_fits_the_gpu(make_trainer: MakeTrainer) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    total = torch.cuda.get_device_properties(0).total_memory

    class Large(SimpleModel):
        def forward(self, batch: Any) -> Any:
            waste = torch.empty(len(batch[0]) * total // 8, dtype=torch.uint8, device=batch[0].device)
            return super().forward(batch) + 0 * waste[0].float()

    trainer = make_trainer(
        model=Large(),
        device="gpu",
        train_dataloader=make_trainer.loader(64, batch_size=32),
        device_train_microbatch_size="auto",
    )
    with pytest.warns(RuntimeWarning, match=r"is reduced from"):
        trainer.fit()

    assert trainer.state.device_train_microbatch_size in (2, 4)


class Copies(Callback):
    """Counts the copies before each batch; after six batches, another program needs memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.by_batch = 0, list[int]()
        monkeypatch.setattr(microbatch, "global_states", self.copy)

    def copy(self) -> Any:
        self.number += 1
        return global_states()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.by_batch.append(self.number)
        self.number = 0
        if state.timestamp.batch == "6ba":
            state.model.limit = 1


def test_batches_that_will_fit_are_not_copied(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    trainer = make_trainer(model=Hungry(), device_train_microbatch_size=4, max_duration="11ba", callbacks=copies)
    trainer.state.auto_microbatching = True
    with pytest.warns(RuntimeWarning, match="CUDA out of memory in training"):
        trainer.fit()

    assert trainer.state.device_train_microbatch_size == 1
    assert copies.by_batch == [1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]


def test_a_batch_is_split_only_on_request(make_trainer: MakeTrainer) -> None:
    class TwoViews(list[Any]):
        batch_size = 4  # of what its data set has; each gives two samples

    sizes: list[int] = []

    class Counting(SimpleModel):
        def forward(self, batch: Any) -> Any:
            sizes.append(len(batch[0]))
            return super().forward(batch)

    class Halving(Callback):
        def fit_start(self, state: State, logger: Logger) -> None:
            state.device_train_microbatch_size = 2

    def trained(**options: Any) -> list[int]:
        sizes.clear()
        batches = TwoViews(make_trainer.loader(16, batch_size=8))
        trainer = make_trainer(model=Counting(), train_dataloader=batches, max_duration="1ep", **options)
        size = trainer.state.device_train_microbatch_size
        trainer.fit()
        return [size, *sizes]

    assert [4, 8, 8] == trained()
    assert [4, 4, 4, 4, 4] == trained(device_train_microbatch_size=4)
    assert [4, *[2] * 8] == trained(callbacks=Halving())


def test_a_counter_of_tokens_gets_the_batches_of_the_loader_alone(make_trainer: MakeTrainer) -> None:
    counted: list[int] = []

    class Tokens(SimpleModel):
        def forward(self, batch: Any) -> Any:
            return super().forward((batch["x"], batch["y"]))

        def loss(self, outputs: Any, batch: Any) -> Any:
            return super().loss(outputs, (batch["x"], batch["y"]))

    def count_tokens(batch: Any) -> int:
        counted.append(len(batch["mask"]))
        return 6 * len(batch["mask"])

    def split(batch: Any, size: int) -> list[Any]:
        return [{name: batch[name][i : i + size] for name in ("x", "y")} for i in range(0, len(batch["x"]), size)]

    class Drops(Algorithm):
        def match(self, event: Event, state: State) -> bool:
            return event is Event.AFTER_DATALOADER

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            state.batch = {**state.batch, "x": state.batch["x"][:3], "y": state.batch["y"][:3]}

    batches = [{"x": x, "y": y, "mask": torch.ones(len(y))} for x, y in make_trainer.loader(8, batch_size=4)]
    spec = DataSpec(
        batches,
        split_batch=split,
        get_num_samples_in_batch=lambda batch: len(batch["y"]),
        get_num_tokens_in_batch=count_tokens,
    )
    trainer = make_trainer(
        model=Tokens(),
        train_dataloader=spec,
        algorithms=Drops(),
        device_train_microbatch_size=2,
        max_duration="1ep",
    )
    trainer.fit()

    assert [4, 4] == counted
    assert trainer.state.timestamp.token == 48
