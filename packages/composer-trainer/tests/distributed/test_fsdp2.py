"""Models divided among ranks by `fully_shard`, against the same runs with `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_runs import (
    FSDP,
    OPTIMIZERS,
    Block,
    Narrow,
    Regression,
    answer,
    batches,
    data,
    filled,
    gap,
    make,
    needs_sharding,
    on_ranks,
    part,
    run_all,
    samples,
    shared_data,
    trained,
)
from torch.distributed.fsdp import FSDPModule

from composer.core import Algorithm, Evaluator, Event
from composer.utils import dist

pytestmark = needs_sharding
EXACT = 1e-12
Scenarios = dict[str, Callable[..., Any]]


# ---- two ranks: the same as data parallel ----


def optimizers() -> dict[str, float]:
    return {name: gap(trained(FSDP, optimizer=name), trained(optimizer=name)) for name in OPTIMIZERS}


class Chain(torch.nn.Sequential):
    """Blocks of which each is a unit."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        blocks = [Block(5) for _ in range(4)]
        super().__init__(torch.nn.Linear(3, 5), *blocks, torch.nn.Linear(5, 2))
        for position, block in enumerate(blocks, start=1):
            block.position = position


def prefetched() -> Any:
    ahead: dict[str, list[list[int]]] = {"forward": [], "backward": []}
    for direction, calls in ahead.items():
        _record(f"set_modules_to_{direction}_prefetch", calls)
    options = {"forward_prefetch": True, "forward_prefetch_limit": 2, "backward_prefetch_limit": 3}
    runs = [
        trained(config, model=filled(Regression(Chain, own=False)), optimizer="adamw")
        for config in ({"fsdp": options}, None)
    ]
    return gap(*runs), ahead


def _record(name: str, calls: list[list[int]]) -> None:
    plain = getattr(FSDPModule, name)

    def method(unit: Any, modules: Any) -> None:
        calls.append([module.position for module in (unit, *modules)])
        plain(unit, modules)

    setattr(FSDPModule, name, method)


def held() -> Any:
    run = trained(FSDP)
    return run["held"], run["all"], run["sharded"]


def microbatches() -> dict[str, float]:
    whole = trained(FSDP, model=filled(Regression(Narrow)))
    return {"ddp": gap(trained(model=filled(Regression(Narrow))), whole)} | {
        str(strategy): gap(
            trained(
                FSDP,
                model=filled(Regression(Narrow)),
                device_train_microbatch_size=2,
                ddp_sync_strategy=strategy,
            ),
            whole,
        )
        for strategy in (None, "single_auto_sync", "multi_auto_sync")
    }


def evaluated() -> Any:
    loaders = {
        "unequal": lambda: data(9, 3),
        "padded": lambda: shared_data(7, 2, dist.get_global_rank()),
        "single": lambda: shared_data(1, 2, dist.get_global_rank()),
    }
    runs = []
    for config in (FSDP, None):
        evaluators = [
            Evaluator(
                label=name, dataloader=make_loader(), device_eval_microbatch_size=1 if name == "unequal" else None
            )
            for name, make_loader in loaders.items()
        ]
        runs.append(trained(config, eval_dataloader=evaluators, eval_interval="3ba"))
    return gap(*runs), runs[0]["metrics"]


def predicted() -> Any:
    outputs = []
    for config in (FSDP, None):
        trainer = make(config)
        outputs.append(trainer.predict(data(7, 2)))
        trainer.close()
    equal = all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
    return len(outputs[0]), equal


class Swaps(Algorithm):
    """Evaluates with other weights, as averaging methods do."""

    events = frozenset({Event.EVAL_START, Event.EVAL_END})

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        sign = 1.0 if event is Event.EVAL_START else -1.0
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(sign)


def swapped() -> list[float]:
    """Weights that change around evaluations are gathered anew."""
    gaps = []
    for reshard in (True, False):
        runs = [
            trained(config, algorithms=Swaps(), eval_dataloader=data(4), eval_interval="2ba")
            for config in ({"fsdp": {"reshard_after_forward": reshard}}, None)
        ]
        gaps.append(gap(*runs))
    return gaps


def unequal_loaders() -> list[int]:
    rows = part()
    return [
        len(trained(config, train_dataloader=batches(rows, 3 + dist.get_global_rank()), max_duration="1ep")["losses"])
        for config in (FSDP, None)
    ]


def unequal_microbatches() -> str:
    rows = slice(0, 2 + 2 * dist.get_global_rank())
    trainer = make(FSDP, train_dataloader=batches(rows), device_train_microbatch_size=2)
    return answer(trainer.fit)


def nothing_to_evaluate() -> str:
    loader = batches(part()) if dist.get_global_rank() == 0 else Empty()
    trainer = make(FSDP)
    evaluator = Evaluator(label="eval", dataloader=loader, subset_num_batches=2)
    return answer(lambda: trainer.eval([evaluator]))


class Empty:
    """A loader that yields nothing."""

    def __iter__(self) -> Any:
        return iter(())


def forced() -> str:
    return answer(lambda: make(FSDP, ddp_sync_strategy="forced_sync"))


def foreign_optimizer() -> str:
    return answer(lambda: make(FSDP, optimizers=torch.optim.SGD(filled(Regression()).parameters(), lr=0.1)))


def other_precision() -> str:
    trainer = make(FSDP)
    return answer(lambda: trainer.fit(precision="amp_bf16"))


def wrong_degrees() -> str:
    return answer(lambda: make({"fsdp": {"data_parallel_shard_degree": 3}}))


class Surgery(Algorithm):
    """Replaces a layer before training; what is loaded later must find it there."""

    events = frozenset({Event.INIT})

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        new = torch.nn.Linear(5, 1).double()
        with torch.no_grad():
            new.weight.fill_(0.25)
            new.bias.zero_()
        old, state.model.net.narrow = state.model.net.narrow, new
        groups = state.optimizers[0].param_groups
        replaced = {id(old.weight): new.weight, id(old.bias): new.bias}
        for group in groups:
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]


def surgery() -> float:
    return gap(trained(FSDP, algorithms=Surgery()), trained(algorithms=Surgery()))


TWO: Scenarios = {
    f.__name__: f
    for f in (
        optimizers,
        prefetched,
        held,
        microbatches,
        evaluated,
        predicted,
        swapped,
        unequal_loaders,
        unequal_microbatches,
        nothing_to_evaluate,
        forced,
        foreign_optimizer,
        other_precision,
        wrong_degrees,
        surgery,
    )
}


def train_on_two() -> dict[str, Any]:
    return run_all(TWO)


@pytest.fixture(scope="module")
def two() -> Callable[[str], list[Any]]:
    """Return the results of a scenario on two ranks."""
    return on_ranks(train_on_two, 2)


def test_every_optimizer_trains_as_in_data_parallel(two: Any) -> None:
    for gaps in two("optimizers"):
        assert max(gaps.values()) < EXACT, gaps


def test_weights_gathered_ahead_are_those_of_the_next_units(two: Any) -> None:
    for difference, ahead in two("prefetched"):
        assert difference < EXACT
        assert [[1, 2, 3], [2, 3, 4], [3, 4], [4]] == ahead["forward"]
        assert [[1], [2, 1], [3, 2, 1], [4, 3, 2, 1]] == ahead["backward"]


def test_each_rank_holds_only_its_part(two: Any) -> None:
    (first, everything, sharded), (second, _, _) = two("held")

    assert first + second == everything
    assert 0 < second < first < 0.7 * everything  # the first one has what cannot be divided
    assert {"scale", "net.narrow.weight", "net.narrow.bias", "net.blocks.0.one.weight"} <= set(sharded)


def test_microbatches_equal_one_batch(two: Any) -> None:
    for gaps in two("microbatches"):
        assert max(gaps.values()) < EXACT, gaps


def test_evaluation_counts_every_sample_once_whatever_the_lengths(two: Any) -> None:
    for difference, metrics in two("evaluated"):
        assert difference < EXACT
        total = {name: value for name, value in metrics.items() if name.endswith("/count")}
        expected = {
            "unequal/count": _sum(9) + _sum(3),
            "padded/count": _sum(7),
            "single/count": _sum(1),
        }
        assert {name: pytest.approx(value) for name, value in expected.items()} == {n: total[n] for n in expected}


def _sum(size: int) -> float:
    return float(samples(size)[1][:, 0].sum())


def test_prediction_works_with_loaders_of_any_length(two: Any) -> None:
    assert two("predicted") == [(4, True), (1, True)]


def test_weights_that_change_around_an_evaluation_are_gathered_anew(two: Any) -> None:
    for gaps in two("swapped"):
        assert max(gaps) < 1e-9, gaps


def test_loaders_of_unequal_length_end_together(two: Any) -> None:
    assert two("unequal_loaders") == [[3, 3], [3, 3]]


def test_unequal_numbers_of_microbatches_are_an_error_on_all_ranks(two: Any) -> None:
    for rank, message in enumerate(two("unequal_microbatches")):
        assert "the same number of microbatches" in message
        assert f"not all have {1 + rank}, like rank {rank}" in message


def test_a_rank_without_anything_to_evaluate_is_an_error_on_all_ranks(two: Any) -> None:
    for message in two("nothing_to_evaluate"):
        assert "RuntimeError: All ranks need at least one batch to run a sharded model" in message


def test_gradients_cannot_be_exchanged_by_force(two: Any) -> None:
    for message in two("forced"):
        assert "`ddp_sync_strategy='forced_sync'` is not supported" in message


def test_an_optimizer_of_another_model_is_refused(two: Any) -> None:
    for message in two("foreign_optimizer"):
        assert "ValueError: `optimizers` must hold parameters of `model`" in message


def test_the_precision_stays_that_the_model_was_divided_for(two: Any) -> None:
    for message in two("other_precision"):
        assert "ValueError: `precision` must stay 'fp32' once the model is sharded for it, got 'amp_bf16'" in message


def test_degrees_that_do_not_fit_the_ranks_are_refused(two: Any) -> None:
    for message in two("wrong_degrees"):
        assert "must multiply to the number of ranks, 2, but 1 copies x 3 shards x 1 parts" in message


def test_what_surgery_put_in_is_sharded(two: Any) -> None:
    assert max(two("surgery")) < EXACT
