"""Several ranks that search their microbatch size, or of which one stops training: none is left waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError

from composer.core import Algorithm, Callback, DataSpec, Evaluator, Event, State
from composer.devices import DeviceCPU
from composer.models import ComposerModel
from composer.testing import deep_compare, run_on_ranks
from composer.trainer import Trainer, construction
from composer.trainer.construction import RunSettings
from composer.trainer.data_parallel import DataParallel
from composer.trainer.microbatch import MicrobatchSearch
from composer.trainer.options import Arguments
from composer.trainer.sharded import ShardedParallel
from composer.utils import dist
from composer.utils.misc import get_free_tcp_port
from composer.utils.parallelism import FSDP2Config, ParallelismConfig

BATCHES, TIMEOUT = 3, 60.0
X = torch.randn(BATCHES, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(BATCHES, 8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
HALVES = (slice(0, 4), slice(4, 8))
UNEQUAL = (slice(0, 3), slice(3, 8))
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(OUT_OF_MEMORY)


class Hungry(ComposerModel):
    """Whose memory holds no more than `limit` samples in the `where` of some ranks; with `noise`, sizes matter."""

    def __init__(
        self,
        where: str = "",
        limit: int = 2,
        hungry: tuple[int, ...] = (1,),
        noise: bool = False,
        dtype: torch.dtype = torch.float64,
        error: Exception | None = None,
        clean: int = 0,
    ) -> None:
        super().__init__()
        self.where, self.limit, self.error, self.clean = where, limit, error, clean
        self.is_hungry = dist.get_global_rank() in hungry
        self.second_pass = False
        extra = [torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3)] if noise else []
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), *extra, torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)
        generator = torch.Generator().manual_seed(0)
        for weight in self.net.parameters():
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype)

    def _eat(self, samples: int) -> bool:
        """Return True if memory runs out."""
        self.clean -= samples
        return self.is_hungry and samples > self.limit and self.clean < 0

    def forward(self, batch: Any) -> Any:
        middle = self.net[:-1](batch[0])  # running statistics and the generator have moved when memory runs out
        if self.where == "backward" and self._eat(len(batch[0])):
            middle = FailsInBackward.apply(middle)
        here = self.where == "forward" or (self.where == "second pass" and self.second_pass)
        if here and self._eat(len(batch[0])):
            raise RuntimeError(OUT_OF_MEMORY) if self.error is None else self.error
        return self.net[-1](middle)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return (outputs - batch[1]).square().mean()

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        if self.where == "evaluation" and self._eat(len(batch[0])):
            raise RuntimeError(OUT_OF_MEMORY) if self.error is None else self.error
        return self.net(batch[0]) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"error": MeanSquaredError().set_dtype(torch.float64)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


class TwoPasses(torch.optim.Optimizer):
    """Climbs along this rank's own gradient, then descends with the common gradient of that place."""

    _step_supports_amp_closure = True

    def __init__(self, model: Hungry) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.model = model

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        with torch.enable_grad():
            loss = closure(ddp_sync=False)
        climbed = [0.5 * p.grad for p in parameters]
        torch._foreach_add_([p.data for p in parameters], climbed)
        self.model.second_pass = True
        with torch.enable_grad():
            second = closure(loss_dict={})
        self.model.second_pass = False
        torch._foreach_sub_([p.data for p in parameters], climbed)
        if second is not None:
            torch._foreach_sub_([p.data for p in parameters], [0.1 * p.grad for p in parameters])
        return loss


class Clip(Algorithm):
    """Clips the gradients of all ranks."""

    events = frozenset({Event.AFTER_TRAIN_BATCH})

    def apply(self, event: Event, state: State, logger: Any) -> None:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)


class Draws(Algorithm):
    """Draws for every microbatch."""

    events = frozenset({Event.AFTER_LOSS})

    def apply(self, event: Event, state: State, logger: Any) -> None:
        state.loss = state.loss * torch.rand(())


def batches_of(part: slice, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [(x[part].to(dtype), y[part].to(dtype)) for x, y in zip(X, Y, strict=True)]


def make(
    model: Hungry,
    *,
    size: int = 4,
    auto: bool = False,
    parts: tuple[slice, slice] = HALVES,
    optimizer: Callable[[Hungry], torch.optim.Optimizer] | None = None,
    **kwargs: Any,
) -> Trainer:
    dtype = next(model.parameters()).dtype
    own: dict[str, Any] = {"train_dataloader": batches_of(parts[dist.get_global_rank()], dtype), "max_duration": "2ep"}
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer(model),
        **{
            "device_train_microbatch_size": size,
            **own,
            "progress_bar": False,
            "device": "cpu",
            "seed": 0,
            "dist_timeout": TIMEOUT,
            **kwargs,
        },
    )
    trainer.state.auto_microbatching = auto  # the argument needs a GPU, which this does not
    return trainer


def outcome(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state
    trainer.close()
    return {
        "weights": {name: tensor.clone() for name, tensor in state.model.state_dict().items()},
        "losses": dict(state.total_loss_dict),
        "metrics": dict(state.train_metric_values),
        "size": state.device_train_microbatch_size,
    }


def error_of(act: Callable[[], Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            act()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what the test is about
            return f"{type(error).__name__}: {error}"
    return "no error"


# ---- two ranks, once for all tests: a process takes seconds to import everything


def on_ranks() -> dict[str, Any]:
    construction.atexit = AtExit()  # type: ignore[assignment]
    parts = (searches, failures, thrashing, evaluations, eval_failures, stops, leaving_the_group)
    return {part.__name__: part() for part in parts}


Ranks = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Return the results of a function on all ranks."""
    results = run_on_ranks(on_ranks, 2, timeout=180.0, backend=None)
    return lambda part: [result[part] for result in results]


# ---- training


SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the model, of the Trainer
    "forward": ({"where": "forward"}, {}),
    "backward": ({"where": "backward"}, {}),
    "forward, the other rank": ({"where": "forward", "hungry": (0,)}, {}),
    "forward, both": ({"where": "forward", "hungry": (0, 1)}, {}),
    "running statistics and dropout": ({"where": "forward", "noise": True}, {"algorithms": Draws()}),
    "backward, running statistics and dropout": ({"where": "backward", "noise": True}, {"algorithms": Draws()}),
    "every strategy": ({"where": "forward"}, {"ddp_sync_strategy": "forced_sync", "algorithms": Clip()}),
    "unequal batches": ({"where": "backward"}, {"parts": UNEQUAL, "size": 8}),
    "down to one": ({"where": "forward", "limit": 1}, {"algorithms": Clip()}),
    "later on": ({"where": "forward", "clean": 17}, {}),
    "two passes": ({"where": "forward"}, {"optimizer": TwoPasses}),
    "the second of two passes": ({"where": "second pass"}, {"optimizer": TwoPasses, "algorithms": Clip()}),
    "fp16": ({"where": "backward", "dtype": torch.float32}, {"precision": "amp_fp16"}),
    "fp16, second of two passes": (
        {"where": "second pass", "dtype": torch.float32},
        {"precision": "amp_fp16", "optimizer": TwoPasses},
    ),
}


def searches() -> dict[str, Any]:
    return {name: search(*case) for name, case in SEARCHES.items()}


def search(model: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    found = make(Hungry(**model), auto=True, **kwargs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found.fit()
    size = model.get("limit", 2)
    known = make(Hungry(**{**model, "where": ""}), **{**kwargs, "size": size})
    known.fit()
    return {
        "found": outcome(found),
        "known": outcome(known),
        "told": [str(warning.message) for warning in told if warning.category is RuntimeWarning],
    }


@pytest.mark.parametrize("case", SEARCHES)
def test_ranks_that_search_train_like_ranks_that_knew_the_size(case: str, ranks: Ranks) -> None:
    model, kwargs = SEARCHES[case]
    tolerance = 1e-2 if case == "fp16, second of two passes" else 1e-10
    first, second = (part[case] for part in ranks("searches"))

    if not model.get("noise"):  # buffers are those of each rank until an evaluation
        deep_compare(first["found"]["weights"], second["found"]["weights"], atol=1e-12 if "passes" in case else 0.0)
    for result in (first, second):
        deep_compare(result["known"], result["found"], atol=tolerance, rtol=tolerance)
        assert model.get("limit", 2) == result["found"]["size"]
    assert first["told"] == second["told"]
    rank = "ranks 0, 1" if model.get("hungry") == (0, 1) else f"rank {model.get('hungry', (1,))[0]}"
    start = kwargs.get("size", 4)
    expected = f"CUDA out of memory in training on {rank}. `device_train_microbatch_size` is reduced from {start} to "
    assert first["told"][0].startswith(expected)
    assert first["told"][-1].endswith(f"to {model.get('limit', 2)} on all ranks.")


def connected() -> DataParallel:
    strategy = DataParallel()
    strategy.connect(DeviceCPU(), TIMEOUT)
    return strategy


def failures() -> dict[str, str]:
    def fit(**model: Any) -> str:
        return error_of(make(Hungry("forward", 0, **model), auto=True).fit)

    def synchronised() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.SyncBatchNorm(1))
        MicrobatchSearch(State(model=model), connected()).check()

    def sharded() -> None:
        config = ParallelismConfig(fsdp=FSDP2Config())
        settings = RunSettings(State(model=(model := Hungry())), model, ShardedParallel(config))
        options = Arguments(
            train_dataloader=DataSpec(batches_of(HALVES[0])),
            train_dataloader_label="train",
            train_subset_num_batches=-1,
            device_train_microbatch_size="auto",
        )
        settings.set_train_data(options)

    return {
        "one sample": fit(),
        "one sample on both": fit(hungry=(0, 1)),
        "another error": fit(error=ValueError("a bad batch")),
        "an error of CUDA": fit(error=RuntimeError("CUDA error: device-side assert triggered")),
        "another error on both": fit(hungry=(0, 1), error=ValueError("a bad batch")),
        "SyncBatchNorm": error_of(synchronised),
        "sharded": error_of(sharded),
    }


EVERYWHERE = {
    "one sample": "RuntimeError: CUDA out of memory on rank 1: training does not fit even with "
    "`device_train_microbatch_size=1`. Use a smaller",
    "one sample on both": "RuntimeError: CUDA out of memory on ranks 0, 1: training does not fit",
    "another error on both": "ValueError: a bad batch",
    "SyncBatchNorm": "ValueError: `device_train_microbatch_size='auto'` must not be used on 2 ranks with "
    "`torch.nn.SyncBatchNorm` (`1`)",
    "sharded": "ValueError: `device_train_microbatch_size='auto'` must not be used with a sharded model",
}


@pytest.mark.parametrize("case", EVERYWHERE)
def test_what_cannot_go_on_fails_alike_on_all_ranks(case: str, ranks: Ranks) -> None:
    for result in ranks("failures"):
        assert result[case].startswith(EVERYWHERE[case])


def test_ranks_hear_of_the_error_of_another_one(ranks: Ranks) -> None:
    first, second = ranks("failures")

    assert "ValueError: a bad batch" == second["another error"]
    assert second["an error of CUDA"].startswith(
        "RuntimeError: Encountered non-addressable cuda error while using auto"
    )
    for case in ("another error", "an error of CUDA"):
        expected = "RuntimeError: Rank 1 failed in the forward or backward pass of this batch. See the log of rank 1 "
        expected += "for the reason."
        assert expected == first[case]


class Tight:
    """A replacement of the memory check, with a fixed result."""

    def __init__(self, found: bool) -> None:
        self._found = found

    def check(self) -> bool:
        return self._found


def thrashing() -> list[tuple[float | None, list[str]]]:
    results = []
    for samples in (4, 1):
        state = State(model=torch.nn.Linear(1, 1), device_train_microbatch_size=4)
        search = MicrobatchSearch(state, connected())
        search._thrashing = Tight(dist.get_global_rank() == 1)  # type: ignore[assignment]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            search.run(lambda: None, samples)
        results.append((state.device_train_microbatch_size, [str(warning.message) for warning in told]))
    return results


def test_all_ranks_go_on_with_less_if_the_allocator_of_one_is_pressed(ranks: Ranks) -> None:
    for halved, least in ranks("thrashing"):
        text = "CUDA nearly out of memory in training on rank 1. `device_train_microbatch_size` is reduced from 4 to 2"
        assert (2, [f"{text} on all ranks."]) == halved
        assert (4, []) == least  # a single sample cannot be split


# ---- evaluation


def evaluator_of(label: str, batches: int = BATCHES, auto: bool = True) -> Evaluator:
    part = HALVES[dist.get_global_rank()]
    evaluator = Evaluator(label=label, dataloader=batches_of(part)[:batches], device_eval_microbatch_size=4)
    evaluator.auto_microbatching = auto  # the argument needs a `batch_size`, which a list has not
    return evaluator


def evaluations() -> dict[str, Any]:
    batches = BATCHES - dist.get_global_rank()  # ranks need not have equally many
    evaluator = evaluator_of("auto", batches)
    trainer = make(Hungry("evaluation", 1), eval_dataloader=[evaluator, evaluator_of("plain", batches, auto=False)])
    trainer.state.model.module.where = ""
    trainer.eval()
    sizes = [evaluator.device_eval_microbatch_size]
    trainer.state.model.module.where = "evaluation"
    trainer.state.evaluators[1].device_eval_microbatch_size = 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.eval()
    trainer.close()
    values = {label: metrics["error"].compute() for label, metrics in trainer.state.eval_metrics.items()}
    return {
        "sizes": [*sizes, evaluator.device_eval_microbatch_size],
        "values": values,
        "told": [str(warning.message) for warning in told],
    }


def test_ranks_evaluate_on_their_own_and_keep_the_smallest_size(ranks: Ranks) -> None:
    first, second = ranks("evaluations")

    for result in (first, second):
        assert [4, 1] == result["sizes"]
        deep_compare(result["values"]["plain"], result["values"]["auto"], atol=1e-10)
    assert [] == first["told"]
    text = "CUDA out of memory in the evaluator 'auto' on rank 1. `device_eval_microbatch_size` is reduced from"
    assert [f"{text} 4 to 2.", f"{text} 2 to 1."] == second["told"]


def eval_failures() -> list[str]:
    errors = []
    for error in (None, ValueError("a bad batch")):
        trainer = make(Hungry("evaluation", 0, error=error), eval_dataloader=evaluator_of("auto"))
        errors.append(error_of(trainer.eval))
    trainer = make(Hungry(), eval_dataloader=evaluator_of("auto"))
    trainer._strategy.collective_forward = True
    errors.append(error_of(trainer.eval))
    return errors


def test_an_evaluation_that_fails_on_one_rank_fails_on_all(ranks: Ranks) -> None:
    first, second = ranks("eval_failures")

    text = "does not fit even with `device_eval_microbatch_size=1`. Use a smaller model"
    assert first[0].startswith(f"RuntimeError: CUDA out of memory on rank 1: the evaluator 'auto' {text}")
    assert second[0].startswith(f"RuntimeError: CUDA out of memory: the evaluator 'auto' on rank 1 {text}")
    assert "RuntimeError: Rank 1 failed in the evaluation of 'auto'. See the log of rank 1 for the reason." == first[1]
    assert "ValueError: a bad batch" == second[1]
    for result in (first, second):
        assert "`device_eval_microbatch_size='auto'` must not be used with a sharded model" in result[2]


# ---- stopping


class Stop(Callback):
    """Stops some ranks when an event comes at a batch; notes the epochs that begin and end."""

    def __init__(self, event: str, batch: int, ranks: tuple[int, ...]) -> None:
        self.at, self.batch, self.ranks = event, batch, ranks
        self.seen: list[str] = []

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        if event in (Event.EPOCH_END, Event.FIT_END):
            self.seen.append(f"{event.value} {state.timestamp.batch.value}")
        if event.value == self.at and state.timestamp.batch == self.batch and dist.get_global_rank() in self.ranks:
            state.stop_training()


STOPS: dict[str, tuple[tuple[str, int, tuple[int, ...]], int]] = {  # event, batch, ranks; batches trained
    "one rank": (("batch_end", 2, (0,)), 2),
    "the other rank": (("batch_end", 4, (1,)), 4),
    "both ranks": (("batch_end", 2, (0, 1)), 2),
    "in the middle of a batch": (("batch_start", 1, (1,)), 2),
    "before a batch": (("before_dataloader", 1, (1,)), 2),
    "at the last batch of an epoch": (("batch_end", 3, (0,)), 3),
    "between epochs": (("epoch_end", 3, (0,)), 3),
    "at the start": (("fit_start", 0, (1,)), 0),
    "at the end": (("batch_end", 9, (1,)), 9),
}


def stops() -> dict[str, Any]:
    return {name: stopped(*at) for name, (at, _) in STOPS.items()}


def stopped(*at: Any) -> dict[str, Any]:
    stop = Stop(*at)
    trainer = make(Hungry(noise=True), callbacks=stop, max_duration="3ep")
    trainer.fit()
    batch = trainer.state.timestamp.batch.value
    seen, stop.ranks = list(stop.seen), ()
    trainer.fit(duration="5ba")  # what ranks had drawn in advance is not lost
    whole = make(Hungry(noise=True), max_duration=f"{batch + 5}ba")
    whole.fit()
    return {"batch": batch, "seen": seen, "stopped": outcome(trainer), "whole": outcome(whole)}


@pytest.mark.parametrize("case", STOPS)
def test_all_ranks_stop_after_the_batch_after_which_one_does(case: str, ranks: Ranks) -> None:
    first, second = (part[case] for part in ranks("stops"))
    batch = STOPS[case][1]
    epochs = [f"epoch_end {ended}" for ended in range(3, batch + 1, 3)]

    assert [*epochs, f"fit_end {batch}"] == first["seen"] == second["seen"]
    for result in (first, second):
        assert batch == result["batch"]
        deep_compare(result["whole"]["weights"], result["stopped"]["weights"])


# ---- the end of the process


class AtExit:
    """Collects the functions that are registered for the end of the process."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, ...]] = []

    def register(self, *what: Any) -> None:
        self.registered.append(what)

    def unregister(self, function: Any) -> None:
        self.registered = [what for what in self.registered if what[0] is not function]


def leaving_the_group() -> tuple[list[str], list[bool]]:
    """Return the names of the registered functions, and True if the process group still exists."""
    registered = construction.atexit.registered  # type: ignore[attr-defined]
    [(leave, ours)] = [what for what in registered if len(what) == 2]
    there = []
    leave(object())  # another one than the Trainer's
    there.append(torch.distributed.is_initialized())
    sys.last_value = ValueError("the program ends by this")
    leave(ours)
    there.append(torch.distributed.is_initialized())
    del sys.last_value
    leave(ours)
    there.append(torch.distributed.is_initialized())
    leave(ours)  # nothing is left to do
    return sorted(what[0].__name__ for what in registered), there


def test_the_group_is_left_once_unless_it_is_anothers_or_the_program_failed(ranks: Ranks) -> None:
    once = ["_destroy_group", "_release_last_exchange"]
    assert [(once, [True, True, False])] * 2 == ranks("leaving_the_group")


PROGRAM = """
import atexit, torch
atexit.register(lambda: print("still in" if torch.distributed.is_initialized() else "left"))
from composer.testing import SimpleModel
from composer.trainer import Trainer
for _ in range(2):
    model = SimpleModel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model=model, optimizers=sgd, device="cpu", progress_bar=False).close()
    assert torch.distributed.is_initialized()
"""


def test_a_program_leaves_the_group_at_its_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_tcp_port())}
    environment |= {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    running = []
    for rank in ("0", "1"):
        own = {**os.environ, **environment, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, str(program)]
        running.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[0].strip() for process in running]

    assert ["left", "left"] == said
    assert [0, 0] == [process.returncode for process in running]


# ---- real memory


class Wasteful(Hungry):
    """Takes a sixth of the memory of rank 1's GPU per sample."""

    def forward(self, batch: Any) -> Any:
        x = batch[0]
        if dist.get_global_rank() == 1:
            share = torch.cuda.get_device_properties(x.device).total_memory // 6
            waste = torch.empty(len(x) * share, dtype=torch.uint8, device=x.device)
            return super().forward(batch) + 0 * waste[0]
        return super().forward(batch)


def on_gpus() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    model = Wasteful()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X.flatten(0, 1), Y.flatten(0, 1)),
        batch_size=8,
        sampler=dist.get_sampler(range(8 * BATCHES)),
    )
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device_train_microbatch_size="auto",
        device="gpu",
        precision="fp32",
        max_duration="2ep",
        progress_bar=False,
        dist_timeout=TIMEOUT,
    )
    trainer.fit()
    return outcome(trainer)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_of_which_one_is_full_train_alike() -> None:
    first, second = run_on_ranks(on_gpus, 2, timeout=240.0, backend=None)

    assert first["size"] == second["size"] in (2, 4)
    deep_compare({k: v.cpu() for k, v in first["weights"].items()}, {k: v.cpu() for k, v in second["weights"].items()})
