"""Precision, gradient scaling, optimizers that need closures, compilation, and the microbatch search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer.core import Algorithm, Event, Precision, State
from composer.loggers import Logger
from composer.optim import DecoupledAdamW, DecoupledSGDW
from composer.testing import SimpleModel, deep_compare
from composer.trainer.precision import ClosureGradScaler
from composer.trainer.step import needs_closure
from composer.trainer.trainer import _adjust_device_train_microbatch_size, _is_cuda_oom
from composer.utils.reproducibility import seed_context

MakeTrainer = Any  # the fixture's class, in conftest.py


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)]
)
def test_forward_and_evaluation_run_in_the_precision(
    make_trainer: MakeTrainer, precision: str, dtype: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    class Watching(Algorithm):
        events = frozenset({Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            seen.append(state.outputs.dtype)

    trainer = make_trainer(
        precision=precision, algorithms=Watching(), eval_dataloader=make_trainer.loader(4), max_duration="1ep"
    )
    trainer.fit()

    assert {dtype} == set(seen)
    assert {torch.float32} == {p.dtype for p in trainer.state.model.parameters()}
    assert (trainer.state.scaler is not None) == (precision == "amp_fp16")
    assert [dtype] * 4 == [output.dtype for output in trainer.predict(make_trainer.loader())]


def test_precision_may_change_between_fits(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    assert trainer.state.scaler is None
    trainer.fit(duration="1ep", precision="amp_fp16")

    assert Precision.AMP_FP16 is trainer.state.precision
    assert isinstance(trainer.state.scaler, torch.amp.GradScaler)


def test_gradients_are_unscaled_when_algorithms_see_them(make_trainer: MakeTrainer) -> None:
    norms: list[torch.Tensor] = []

    class Norms(Algorithm):
        events = frozenset({Event.AFTER_TRAIN_BATCH})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            norms.append(
                torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters() if p.grad is not None])
            )

    for precision in ("fp32", "amp_fp16"):
        make_trainer(precision=precision, algorithms=Norms(), max_duration="1ba").fit()

    # fp16 keeps 11 bits; a scale of 65536 that was left in would be off by that factor.
    torch.testing.assert_close(norms[0], norms[1], rtol=2e-2, atol=0)


class TwoPass(torch.optim.SGD):
    """Needs two gradients per step, and says nothing about it but its signature."""

    def step(self, closure: Callable[..., Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure(ddp_sync=False)
            loss = closure(loss_dict={})
        super().step()
        return loss


class Overflowing(torch.optim.SGD):
    _step_supports_amp_closure = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[Any] = []

    def step(self, closure: Callable[..., Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        self.losses.append(loss)
        if loss is not None:
            super().step()
        return loss


def test_which_optimizers_need_closures() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    single = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, DecoupledSGDW, DecoupledAdamW]
    several = [torch.optim.LBFGS, TwoPass, Overflowing]

    assert [False] * 5 == [needs_closure(cls(parameters, lr=0.1)) for cls in single]
    assert [True] * 3 == [needs_closure(cls(parameters, lr=0.1)) for cls in several]

    class OptionalClosure(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            return closure()

    class NoClosure(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            pass

    assert not needs_closure(OptionalClosure(parameters, {}))
    assert not needs_closure(NoClosure(parameters, {}))


def test_an_optimizer_may_ask_for_a_closure_by_declaration() -> None:
    class Declares(torch.optim.SGD):
        needs_closure = True

    parameters = [torch.nn.Parameter(torch.zeros(1))]
    asked = torch.optim.SGD(parameters, lr=0.1)
    asked.needs_closure = True  # type: ignore[attr-defined]

    assert [True, True] == [needs_closure(Declares(parameters, lr=0.1)), needs_closure(asked)]


def test_a_scheduler_around_the_step_does_not_hide_what_it_needs() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    assert not needs_closure(optimizer)


@pytest.mark.parametrize("size", [None, 2])
def test_an_optimizer_gets_as_many_passes_as_it_wants(make_trainer: MakeTrainer, size: int | None) -> None:
    passes: list[Event] = []

    class Count(Algorithm):
        events = frozenset({Event.BEFORE_TRAIN_BATCH})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            passes.append(event)

    model = make_trainer.model()
    trainer = make_trainer(
        model=model,
        optimizers=TwoPass(model.parameters(), lr=0.1),
        algorithms=Count(),
        max_duration="2ba",
        device_train_microbatch_size=size,
    )
    trainer.fit()

    assert 4 == len(passes)
    assert {"loss/train/total"} == set(trainer.state.total_loss_dict)


def test_lbfgs_trains(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    batches = list(make_trainer.loader())[:1]
    trainer = make_trainer(
        model=model, optimizers=torch.optim.LBFGS(model.parameters(), lr=0.1), train_dataloader=batches
    )
    before = float(model.loss(model(batches[0]), batches[0]).detach())
    trainer.fit()

    assert float(model.loss(model(batches[0]), batches[0]).detach()) < before


def test_a_closure_returns_nothing_when_gradients_overflow(make_trainer: MakeTrainer) -> None:
    class Explodes(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return super().loss(outputs, batch).float() * 1e30

    model = Explodes()
    optimizer = Overflowing(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(model=model, optimizers=optimizer, precision="amp_fp16", max_duration="3ba")
    assert isinstance(trainer.state.scaler, ClosureGradScaler)
    scale = trainer.state.scaler.get_scale()
    trainer.fit()

    assert [None] * 3 == optimizer.losses
    deep_compare(before, {name: p.detach() for name, p in model.named_parameters()})
    assert scale / 8 == trainer.state.scaler.get_scale()


@pytest.mark.parametrize("pass_", [0, 1, 2])
def test_the_step_of_an_optimizer_that_does_not_know_overflows_is_broken_off(
    make_trainer: MakeTrainer, pass_: int
) -> None:
    passes: list[int] = []

    class Explodes(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            passes.append(len(passes))
            return super().loss(outputs, batch).float() * (1e30 if passes[-1] == pass_ else 1.0)

    model = Explodes()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(
        model=model, optimizers=torch.optim.LBFGS(model.parameters(), lr=0.1), precision="amp_fp16", max_duration="1ba"
    )
    assert trainer.state.scaler is not None
    scale = trainer.state.scaler.get_scale()
    trainer.fit()

    assert pass_ + 1 == len(passes)
    assert scale / 2 == trainer.state.scaler.get_scale()
    deep_compare(before, {name: p.detach() for name, p in model.named_parameters()})


def test_a_closure_scaler_steps_like_torchs_where_nothing_overflows(make_trainer: MakeTrainer) -> None:
    def train(cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
        model = make_trainer.model()
        make_trainer(model=model, optimizers=cls(model.parameters(), lr=0.1), precision="amp_fp16").fit()  # type: ignore[call-arg]
        return dict(model.named_parameters())

    deep_compare(train(torch.optim.SGD), train(Overflowing))


@pytest.mark.parametrize("already", [False, True])
def test_compiled_models_train_like_eager_ones(make_trainer: MakeTrainer, already: bool) -> None:
    eager, compiled = make_trainer.model(), make_trainer.model()
    make_trainer(model=eager).fit()
    given = torch.compile(compiled, backend="eager") if already else compiled
    trainer = make_trainer(
        model=given,
        optimizers=torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9),
        compile_config={"backend": "eager"},
    )
    trainer.fit()

    assert trainer.state.model is compiled
    assert compiled._compiled_call_impl is not None
    deep_compare(dict(eager.named_parameters()), dict(compiled.named_parameters()), atol=1e-6)


# ---- the microbatch search; the whole of it needs a GPU, its parts do not ----


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
        with pytest.warns(RuntimeWarning, match=rf"goes from .* to {expected}"):
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
    with pytest.warns(RuntimeWarning, match=r"`device_train_microbatch_size` goes from 4 to 2"):
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
    with pytest.warns(RuntimeWarning, match=r"goes from 4 to 2"):
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

    with pytest.warns(RuntimeWarning, match=r"goes from 4 to 2"):
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
    with pytest.warns(RuntimeWarning, match=r"`device_eval_microbatch_size` goes from"):
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
    with pytest.warns(RuntimeWarning, match=r"goes from"):
        trainer.fit()

    assert trainer.state.device_train_microbatch_size in (2, 4)
