"""Several processes that train one model with `DistributedDataParallel`."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import CatMetric, MeanSquaredError, SumMetric

from composer.core import Algorithm, DataSpec, Event, State
from composer.devices import DeviceCPU
from composer.distributed import DDPSyncStrategy, ddp_sync_context, prepare_ddp_module
from composer.distributed.ddp import exchange, reduce_gradients
from composer.models import ComposerModel
from composer.testing import deep_compare, run_on_ranks
from composer.trainer import DataParallel, RankStrategy, Trainer
from composer.trainer.precision import ClosureGradScaler
from composer.utils import dist

BATCHES = 4
X = torch.randn(BATCHES, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(BATCHES, 6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Parts = tuple[slice, slice]
EVEN: Parts = (slice(0, 3), slice(3, 6))
UNEVEN: Parts = (slice(0, 2), slice(2, 6))


class Regression(ComposerModel):
    """A small network with a squared error and a metric, all in float64."""

    def __init__(self, seed: int = 0, hidden: int = 4, dict_loss: bool = False) -> None:
        super().__init__()
        self.dict_loss = dict_loss
        self.net = torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2)).double()
        generator = torch.Generator().manual_seed(seed)
        for weight in self.net.parameters():
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        error = (outputs - batch[1]).square().mean()
        return {"error": error, "size": outputs.square().mean() * 0.1} if self.dict_loss else error

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"error": MeanSquaredError().set_dtype(torch.float64)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


class Counting(Regression):
    """Measures how many samples were evaluated, and the sum of their numbers."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else {"count": SumMetric(), "numbers": SumMetric()}

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return batch

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs)


class TwoPasses(torch.optim.Optimizer):
    """Climbs along this rank's own gradient, then descends with the common gradient of that place."""

    _step_supports_amp_closure = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        with torch.enable_grad():
            loss = closure(ddp_sync=False)
        climbed = [0.5 * p.grad.clone() for p in parameters]
        torch._foreach_add_([p.data for p in parameters], climbed)
        with torch.enable_grad():
            closure(loss_dict={})
        torch._foreach_sub_([p.data for p in parameters], climbed)
        torch._foreach_sub_([p.data for p in parameters], [0.1 * p.grad for p in parameters])
        return loss


def batches_of(part: slice | None) -> list[Any]:
    if part is None:
        return [(X[i], Y[i]) for i in range(BATCHES)]
    return [(X[i, part], Y[i, part]) for i in range(BATCHES)]


def make(loader: Any, model: ComposerModel | None = None, **kwargs: Any) -> Trainer:
    model = Regression() if model is None else model
    optimizer = kwargs.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    defaults: dict[str, Any] = {"max_duration": "2ep", "progress_bar": False, "device": "cpu", "seed": 0}
    return Trainer(
        model=model, train_dataloader=loader, optimizers=optimizer(model.parameters()), **{**defaults, **kwargs}
    )


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in trainer.state.get_model_state_dict().items()}


def trained(part: slice | None, dict_loss: bool = False, **kwargs: Any) -> dict[str, Any]:
    spec = DataSpec(batches_of(part), get_num_tokens_in_batch=lambda batch: 10 * len(batch[0]))
    trainer = make(spec, Regression(dict_loss=dict_loss), **kwargs)
    trainer.fit()
    state = trainer.state
    result = {
        "weights": weights_of(trainer),
        "losses": state.total_loss_dict,
        "metrics": {name: value.clone() for name, value in state.train_metric_values.items()},
        "sample": state.timestamp.sample.value,
        "token": state.timestamp.token.value,
    }
    trainer.close()
    return result


STRATEGIES = ("single_auto_sync", "multi_auto_sync", "forced_sync")


def from_readme() -> Any:
    """Return the strategy that the README shows."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^class AverageByHand.*?(?=\n\n\n)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    names = {"torch": torch, "RankStrategy": RankStrategy}
    exec(found[0], names)  # noqa: S102
    return names["AverageByHand"]


def run_by(strategy: str) -> dict[str, Any]:
    """Return the arguments of a `Trainer` that averages gradients when `strategy` says."""
    own = {"after the passes": RankStrategy, "of the README": from_readme()}
    return {"parallelism_config": own[strategy]()} if strategy in own else {"ddp_sync_strategy": strategy}


CASES: dict[str, tuple[Parts, dict[str, Any]]] = {
    "even": (EVEN, {}),
    "dict loss": (EVEN, {"dict_loss": True, "device_train_microbatch_size": 2}),
    "Adam": (EVEN, {"optimizer": torch.optim.Adam}),
    "tokens": (UNEVEN, {"accumulate_train_batch_on_tokens": True, "device_train_microbatch_size": 3}),
    **{
        f"{name} {strategy}": (parts, {**run_by(strategy), "device_train_microbatch_size": size})
        for strategy in (*STRATEGIES, "after the passes", "of the README")
        for name, parts, size in (("one part", EVEN, 3), ("three parts", EVEN, 1), ("uneven", UNEVEN, 1))
    },
}


# ---- two ranks, once for all tests: a process takes seconds to import everything


def on_ranks() -> dict[str, Any]:
    # The first one makes a Trainer, which initialises the process group.
    parts = (
        *(agreements, all_cases, gradients_by_strategy, two_passes, unequal_loaders, evaluations, host_values),
        *(unsized_evaluations, without_passes, ignored_labels),
    )
    return {part.__name__: part() for part in parts}


Ranks = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Return the results of a function on all ranks."""
    results = run_on_ranks(on_ranks, 2, timeout=300.0, backend=None)
    return lambda part: [result[part] for result in results]


# ---- two ranks are as one


def all_cases() -> dict[str, Any]:
    return {name: trained(parts[dist.get_global_rank()], **kwargs) for name, (parts, kwargs) in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_parts_of_the_batch_match_one_with_the_whole(case: str, ranks: Ranks) -> None:
    only_on_ranks = ("ddp_sync_strategy", "parallelism_config", "device_train_microbatch_size")
    kwargs = {key: value for key, value in CASES[case][1].items() if key not in only_on_ranks}
    expected = trained(None, **kwargs)

    first, second = ranks("all_cases")
    for result in (first, second):
        deep_compare(expected, result[case], atol=1e-10, rtol=1e-10)
    deep_compare(first[case]["weights"], second[case]["weights"])


LABELS = torch.tensor([[0, 255, 255, 1, 1, 0], [255, 255, 255, 0, 1, 255], [255] * 6, [1, 0, 255, 255, 0, 1]])
IGNORING: dict[str, Callable[..., torch.Tensor]] = {
    "said": torch.nn.CrossEntropyLoss(ignore_index=255),
    "class weights": torch.nn.CrossEntropyLoss(torch.tensor([1.0, 5.0], dtype=torch.float64), ignore_index=255),
    "not said": lambda outputs, labels: torch.nn.functional.cross_entropy(outputs, labels.long()),
}


def trained_on_labels(case: str, part: slice, **kwargs: Any) -> dict[str, Any]:
    labels = LABELS.where(LABELS != 255, -100) if case == "not said" else LABELS
    net = Regression().net
    trainer = Trainer(
        model=net,
        loss=IGNORING[case],
        train_dataloader=[(X[i, part], labels[i, part]) for i in (0, 1, 3)],
        optimizers=torch.optim.SGD(net.parameters(), lr=0.1),
        max_duration="2ep",
        progress_bar=False,
        device="cpu",
        **kwargs,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`loss` must say which labels")
        trainer.fit()
    result = {"weights": weights_of(trainer), "losses": trainer.state.total_loss_dict}
    trainer.close()
    return result


def ignored_labels() -> dict[str, Any]:
    part = EVEN[dist.get_global_rank()]
    sizes = {"whole": None, "parts": 2}
    return {
        f"{case} {name}": trained_on_labels(case, part, device_train_microbatch_size=size)
        for case in IGNORING
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("size", ["whole", "parts"])
@pytest.mark.parametrize("case", IGNORING)
def test_ranks_weigh_by_the_labels_that_their_loss_counts(case: str, size: str, ranks: Ranks) -> None:
    expected = trained_on_labels(case, slice(0, 6))
    for result in ranks("ignored_labels"):
        deep_compare(expected, result[f"{case} {size}"], atol=1e-12, rtol=1e-12)


class WithoutPasses(torch.optim.Optimizer):
    """Never calls the closure, which it needs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any) -> None:  # type: ignore[override]
        pass


def without_passes() -> dict[str, Any]:
    return trained(None, optimizer=WithoutPasses)


def test_an_optimizer_that_never_calls_its_closure_has_no_losses_on_any_rank(ranks: Ranks) -> None:
    assert [{}, {}] == [result["losses"] for result in ranks("without_passes")]


# ---- when gradients are exchanged


class Choosing(torch.nn.Module):
    """Uses one of three weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(()) for _ in range(3))

    def forward(self, choice: int) -> torch.Tensor:
        return -self.weights[choice] * (dist.get_global_rank() + 1)

    def gradients(self) -> list[float | None]:
        return [None if weight.grad is None else weight.grad.item() for weight in self.weights]


def gradients_by_strategy() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for strategy in (*STRATEGIES, DDPSyncStrategy.SINGLE_AUTO_SYNC):
        module = Choosing()
        state = State(prepare_ddp_module(module, find_unused_parameters=True))
        seen = []
        for choice in (0, 1):
            with ddp_sync_context(state, is_final_microbatch=choice == 1, sync_strategy=strategy):
                state.model(choice).backward()
                if choice == 1 and strategy == "forced_sync":
                    seen.append(module.gradients())
            seen.append(module.gradients())
        results[str(strategy)] = seen
    module = Choosing()
    results["nothing to reduce"] = reduce_gradients(module.parameters())
    module(dist.get_global_rank()).backward()
    reduce_gradients(module.parameters())
    results["one rank only"] = module.gradients()
    module.requires_grad_(False)
    results["unwrapped"] = prepare_ddp_module(module, False) is module
    results["reduced nothing"] = reduce_gradients(module.parameters())
    images = torch.arange(24.0).reshape(1, 2, 3, 4) + dist.get_global_rank()
    if dist.get_global_rank() == 1:
        images = images.to(memory_format=torch.channels_last)
    exchange([images], lambda tensor: torch.distributed.broadcast(tensor, 0, async_op=True))
    results["formats"] = torch.equal(torch.arange(24.0).reshape(1, 2, 3, 4), images)
    return results


def test_each_strategy_exchanges_gradients_when_it_says(ranks: Ranks) -> None:
    first, second = ranks("gradients_by_strategy")

    single = [[-1, None, None], [-1.5, -1.5, None]]
    assert single == first["single_auto_sync"] == first["DDPSyncStrategy.SINGLE_AUTO_SYNC"]
    assert [[-1.5, None, None], [-1.5, -1.5, None]] == first["multi_auto_sync"] == second["multi_auto_sync"]
    assert [[-1, None, None], [-1, -1, None], [-1.5, -1.5, None]] == first["forced_sync"]
    assert [[-2, None, None], [-2, -2, None], [-1.5, -1.5, None]] == second["forced_sync"]
    assert [-0.5, -1, None] == first["one rank only"] == second["one rank only"]
    assert first["unwrapped"]
    assert first["formats"]
    assert second["formats"]


def test_a_model_that_is_not_wrapped_cannot_be_synchronised() -> None:
    with pytest.raises(RuntimeError, match=r"`state.model` must be wrapped .* got Choosing"):
        ddp_sync_context(State(Choosing()), True, "forced_sync")


def test_wrapping_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"the distributed package is not available or has not been initialized"):
        prepare_ddp_module(Choosing(), find_unused_parameters=False)


# ---- passes without exchange


def two_passes() -> list[dict[str, torch.Tensor]]:
    weights = []
    for strategy in ("single_auto_sync", "after the passes"):
        batches = batches_of(EVEN[dist.get_global_rank()])[:1]
        trainer = make(batches, max_duration="1ba", optimizer=TwoPasses, **run_by(strategy))
        trainer.fit()
        weights.append(weights_of(trainer))
    return weights


def test_a_first_pass_without_exchange_uses_the_gradient_of_the_rank(ranks: Ranks) -> None:
    model, slopes = Regression(), []
    for part in EVEN:
        own = Regression()
        weights = list(own.parameters())
        climb = torch.autograd.grad(own.loss(own((X[0, part],)), (X[0, part], Y[0, part])), weights)
        torch._foreach_add_([weight.data for weight in weights], [0.5 * slope for slope in climb])
        slopes.append(torch.autograd.grad(own.loss(own((X[0, part],)), (X[0, part], Y[0, part])), weights))
    for weight, first, second in zip(model.parameters(), *slopes, strict=True):
        weight.data -= 0.1 * (first + second) / 2

    for weights_on_rank in ranks("two_passes"):
        for weights in weights_on_rank:
            deep_compare(model.state_dict(), weights, atol=1e-10, rtol=1e-10)


# ---- loaders and samplers


class Unsized:
    """As many batches as asked for, without saying so."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        return iter(batches_of(EVEN[0])[: self.number])


class Recorder(Algorithm):
    """Notes the numbers of the samples of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []

    events = frozenset({Event.EPOCH_START, Event.AFTER_DATALOADER})

    def apply(self, event: Event, state: State, logger: Any) -> None:
        if event is Event.EPOCH_START:
            self.epochs.append([])
        else:
            self.epochs[-1].extend(state.batch[2].tolist())


class Numbered(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        return X[0, i % 6], Y[0, i % 6], i


def loader_of(size: int, batch_size: int, shuffle: bool, **kwargs: Any) -> torch.utils.data.DataLoader[Any]:
    data = Numbered(size)
    sampler = dist.get_sampler(data, shuffle=shuffle)
    return torch.utils.data.DataLoader(data, batch_size, sampler=sampler, **kwargs)


def unequal_loaders() -> dict[str, Any]:
    results = {}
    number = 4 if dist.get_global_rank() == 0 else 2
    loaders: dict[str, tuple[Any, str]] = {
        "sized": (batches_of(EVEN[0])[:number], "2ep"),
        "unsized": (Unsized(number), "5ba"),
        "mixed": (Unsized(4) if number == 4 else batches_of(EVEN[0])[:2], "2ep"),
    }
    for name, (loader, duration) in loaders.items():
        trainer = make(loader, max_duration=duration)
        trainer.fit()
        now, length = trainer.state.timestamp, trainer.state.dataloader_len
        results[name] = (
            (now.epoch.value, now.batch.value, now.batch_in_epoch.value, now.sample.value),
            None if length is None else length.value,
            now.total_wct,
            weights_of(trainer),
        )
        trainer.close()
    recorder = Recorder()
    make(loader_of(8, 2, shuffle=True), algorithms=recorder).fit()
    results["numbers"] = recorder.epochs
    model = Regression()
    model.net.append(torch.nn.BatchNorm1d(2, dtype=torch.float64))
    trainer = make(batches_of(EVEN[0])[:2], model, max_duration="1ep")
    trainer.fit()
    results["predicted"] = len(trainer.predict(batches_of(EVEN[0])[:number]))
    return results


def test_unequal_loaders_end_together_and_every_sample_is_used_once(ranks: Ranks) -> None:
    first, second = ranks("unequal_loaders")

    assert ((2, 4, 0, 24), 2) == first["sized"][:2]
    assert ((2, 5, 1, 30), None) == first["unsized"][:2]
    assert ((2, 4, 0, 24), 2) == first["mixed"][:2]
    for name in ("sized", "unsized", "mixed"):
        deep_compare(first[name], second[name])
    assert 2 == len(first["numbers"])
    for epoch in range(2):
        assert sorted([*first["numbers"][epoch], *second["numbers"][epoch]]) == list(range(8))
    assert first["numbers"][0] != first["numbers"][1]
    assert (4, 2) == (first["predicted"], second["predicted"])


# ---- evaluation

SIZES = ((7, 2), (5, 4), (3, 1), (1, 2), (8, 2), (4, 4))


class CountingNumbers(Counting):
    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(torch.ones(len(batch[2])) if self._counts(metric) else batch[2])

    def _counts(self, metric: Any) -> bool:
        return bool(metric is self.state.eval_metrics["eval"]["count"])

    state: State


def evaluations() -> dict[str, Any]:
    results: dict[str, Any] = {}

    def evaluate(name: str, loader: Any, subset: int = -1) -> None:
        model = CountingNumbers()
        trainer = make(batches_of(EVEN[0]), model)
        object.__setattr__(model, "state", trainer.state)
        trainer.eval(loader, subset)
        values = trainer.state.eval_metric_values
        seen = trainer.state.eval_timestamp.sample.value
        results[name] = (values["count"].item(), values["numbers"].item(), seen)
        trainer.close()

    for size, batch_size in SIZES:
        for shuffle in (False, True):
            evaluate(f"{size} {batch_size} {shuffle}", loader_of(size, batch_size, shuffle))
    evaluate("subset", loader_of(7, 2, shuffle=False), 1)
    evaluate("dropped", loader_of(9, 2, shuffle=False, drop_last=True))
    evaluate("list", [(X[0], Y[0], torch.arange(6))])
    results["buffers"] = buffers_after_evaluation()
    results["bar"] = progress_bar()
    return results


def buffers_after_evaluation() -> list[torch.Tensor]:
    model = Regression()
    model.net.append(torch.nn.BatchNorm1d(2, dtype=torch.float64))
    trainer = make(batches_of(EVEN[dist.get_global_rank()]), model, eval_dataloader=batches_of(EVEN[0]))
    trainer.fit()
    return [buffer.clone() for buffer in model.buffers()]


def progress_bar() -> str:
    stream = io.StringIO()
    trainer = make(batches_of(EVEN[0]), progress_bar=True, console_stream=stream)
    trainer.fit()
    trainer.close()
    return stream.getvalue()


def test_evaluation_counts_every_sample_once(ranks: Ranks) -> None:
    first, second = ranks("evaluations")

    for size, batch_size in SIZES:
        for shuffle in (False, True):
            name = f"{size} {batch_size} {shuffle}"
            assert (size, sum(range(size))) == first[name][:2] == second[name][:2]
            assert size == first[name][2] + second[name][2]
    assert (4, 0 + 1 + 2 + 3) == first["subset"][:2]
    assert (8, sum(range(8))) == first["dropped"][:2]
    assert (12, 2 * sum(range(6))) == first["list"][:2]
    deep_compare(first["buffers"], second["buffers"])
    assert "epoch" in first["bar"]
    assert second["bar"] == ""


# ---- what ranks agree on


class Surgery(Algorithm):
    """Draws at INIT what it would build, and at FIT_START what training would draw."""

    events = frozenset({Event.INIT, Event.FIT_START})

    def __init__(self) -> None:
        self.drawn: dict[str, float] = {}

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.drawn[event.value] = torch.rand(()).item()


def agreements() -> dict[str, Any]:
    rank = dist.get_global_rank()
    surgery = Surgery()
    model = Regression(seed=rank)
    trainer = make(batches_of(EVEN[rank]), model, algorithms=surgery, seed=None)
    start = weights_of(trainer)
    trainer.fit()
    result = {
        "backend": torch.distributed.get_backend(),
        "ddp": trainer.state.is_model_ddp,
        "run_name": trainer.state.run_name,
        "seed": trainer.state.rank_zero_seed,
        "start": start,
        "drawn": surgery.drawn,
        "end": weights_of(trainer),
        "errors": [refused(case) for case in (other_model, last_seed, no_tokens)],
    }
    trainer.close()
    trainer.close()
    return result


def refused(case: Callable[[], Any]) -> str:
    try:
        case()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def other_model() -> None:
    make(batches_of(EVEN[0]), Regression(hidden=4 + dist.get_global_rank()))


def last_seed() -> None:
    make(batches_of(EVEN[0]), seed=2**32 - 1)


def no_tokens() -> None:
    make(batches_of(EVEN[0]), accumulate_train_batch_on_tokens=True).fit()


def test_ranks_agree_on_the_run_and_refuse_together(ranks: Ranks) -> None:
    first, second = ranks("agreements")

    assert "gloo" == first["backend"]
    assert first["ddp"]
    for key in ("run_name", "seed", "start", "end"):
        deep_compare(first[key], second[key])
    assert first["drawn"]["init"] == second["drawn"]["init"]
    assert first["drawn"]["fit_start"] != second["drawn"]["fit_start"]
    deep_compare(Regression(seed=0).state_dict(), first["start"])
    structure, seed, tokens = zip(first["errors"], second["errors"], strict=True)
    for error in structure:
        assert error.startswith("RuntimeError: `model` must have the same structure on every rank, but it differs")
        assert "net.0.bias" in error
    for error in seed:
        assert "`seed` must be from 0 to 4294967294, so that every rank gets one, got 4294967295" in error
    for error in tokens:
        assert "`accumulate_train_batch_on_tokens=True` needs the number of tokens, but the batch has no class" in error


# ---- numbers of the host, and gradient scaling


def host_values() -> dict[str, Any]:
    rank = dist.get_global_rank()
    parallel = DataParallel()
    parallel.connect(DeviceCPU(), 60.0)
    metrics = [SumMetric(), CatMetric(), object(), SumMetric(dist_sync_fn=dist.all_gather)]
    parallel.prepare_metrics(metrics)
    return {
        "total": parallel.sum_counts(3 + rank, 7, rank == 1, 2.5 + rank),
        "not interrupted": parallel.sum_counts(0.5, 0)[::2],
        "finished": [parallel.any_finished(*each) for each in ((rank == 1,), (False,), (False, rank == 1))],
        "losses": parallel.mean_losses({"a": torch.tensor(1.0 + rank), "b": torch.tensor(2.0, dtype=torch.float16)}),
        "overflow": [overflow_on(1), overflow_on(2)],
        "gathering": [getattr(getattr(metric, "dist_sync_fn", None), "__name__", None) for metric in metrics],
    }


def overflow_on(bad_rank: int) -> tuple[bool, float]:
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = Passing([weight])
    scaler = ClosureGradScaler("cpu", init_scale=4.0)

    def closure(**kwargs: Any) -> torch.Tensor:
        loss = weight * (float("inf") if dist.get_global_rank() == bad_rank else 1.0)
        torch.autograd.backward(scaler.scale(loss))
        return loss.detach()

    result = scaler.step(optimizer, closure=closure)
    scaler.update()
    return result is None, scaler.get_scale()


class Passing(torch.optim.Optimizer):
    _step_supports_amp_closure = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        return closure()


def test_values_of_the_host_are_combined_and_an_overflow_is_everybodys(ranks: Ranks) -> None:
    for result in ranks("host_values"):
        assert (7, 14, True, 2.5) == result["total"]
        assert isinstance(result["total"][0], int)
        assert (1.0, False) == result["not interrupted"]
        assert [(True, False), (False, False), (False, True)] == result["finished"]
        deep_compare({"a": torch.tensor(1.5), "b": torch.tensor(2.0)}, result["losses"])
        assert [(True, 2.0), (False, 4.0)] == result["overflow"]
        assert ["_gather", None, None, "all_gather"] == result["gathering"]


# ---- loaders without a length, and optimizers with modes


class Shares:
    """Yields this rank's share of the batches, without telling how many."""

    def __init__(self, *numbers: int) -> None:
        self.number = numbers[dist.get_global_rank()]

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[i], Y[i]) for i in range(self.number)])


class Doubling(torch.optim.SGD):
    """Doubles the weights in evaluation mode."""

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group.get("train_mode", True) is not training:
                for parameter in group["params"]:
                    parameter.mul_(0.5 if training else 2.0)
            group["train_mode"] = training


def unsized_evaluations() -> dict[str, Any]:
    def doubling(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Doubling(parameters, lr=0.1)
        optimizer.param_groups[0]["train_mode"] = True
        return optimizer

    trainer = make(batches_of(EVEN[dist.get_global_rank()]), optimizer=doubling, eval_dataloader=Shares(3, 1))
    trainer.fit()
    found = {
        "batches": trainer.state.eval_timestamp.batch.value,
        "error": float(trainer.state.eval_metric_values["error"]),
        "weights": weights_of(trainer),
        "predictions": len(trainer.predict(Shares(1, 2))),
    }
    trainer.close()
    return found


def test_ranks_evaluate_and_predict_until_their_own_loader_ends(ranks: Ranks) -> None:
    first, second = ranks("unsized_evaluations")
    model = Regression()
    model.load_state_dict(first["weights"])
    batches = [0, 1, 2, 0]
    expected = torch.stack([model.loss(model((X[i], Y[i])), (X[i], Y[i])) for i in batches]).mean()

    assert (3, 1) == (first["batches"], second["batches"])
    assert (1, 2) == (first["predictions"], second["predictions"])
    deep_compare(first["weights"], second["weights"])
    assert first["error"] == second["error"] == pytest.approx(float(expected.detach()))
