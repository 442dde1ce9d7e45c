"""Runs with DeepSpeed on two ranks, on the CPU, beside runs of one process without it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.mixup import MixUp
from composer.algorithms.sam import SAM
from composer.checkpoint import read_checkpoint
from composer.core import Algorithm, Callback, Precision, State
from composer.deepspeed import DeepSpeed
from composer.loggers import Logger
from composer.optim import LinearWithWarmupScheduler
from composer.testing import deep_compare, run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist

Weights = dict[str, torch.Tensor]
SIZE = 16  # samples in a batch of all ranks
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"Adafactor": torch.optim.Adafactor}
STAGES = (1, 2, 3)

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="DeepSpeed compiles its exchange between processes on a CPU: needs g++"
)


def config(stage: int, **others: Any) -> dict[str, Any]:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}  # else all stay whole
    return {"deepspeed": {"zero_optimization": zero, **others}}


def make_trainer(
    optimizer: str = "AdamW",
    parallelism: Any = None,
    algorithms: tuple[Algorithm, ...] = (),
    duration: str = "2ep",
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
    )
    model[3].requires_grad_(False)
    numbers = torch.Generator().manual_seed(1)
    images, labels = torch.randn(64, 8, generator=numbers), torch.randint(4, (64,), generator=numbers)
    data = TensorDataset(images, labels)
    sampler = dist.get_sampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=SIZE // dist.get_world_size(), sampler=sampler)
    return Trainer(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizers=(OPTIMIZERS | REFUSED)[optimizer]([each for each in model.parameters() if each.requires_grad]),
        schedulers=LinearWithWarmupScheduler("2ba", t_max="2ep"),
        train_dataloader=loader,
        eval_dataloader=loader,
        max_duration=duration,
        algorithms=algorithms,
        parallelism_config=parallelism,
        device="cpu",
        progress_bar=False,
        seed=3,
        **{"precision": "fp32", **options},
    )


def train(*args: Any, save: str | None = None, **options: Any) -> Weights:
    with closing(make_trainer(*args, **options)) as trainer:
        trainer.fit()
        if save is not None:
            trainer.save_checkpoint(save)
        return {name: tensor.clone() for name, tensor in trainer.state.get_model_state_dict().items()}


class Death(Callback):
    """Ends the run as a crash does."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == 5:
            raise InterruptedError


def methods() -> tuple[Algorithm, ...]:
    return LabelSmoothing(0.1), MixUp(alpha=0.2), EMA(half_life="2ba")


def run_all(folder: str) -> dict[str, Weights]:
    """Run everything that needs two ranks in one start of them, which takes longer than the runs."""
    found = {}
    for stage in STAGES:
        for optimizer in OPTIMIZERS:
            file = f"{folder}/{optimizer}{stage}.pt"
            parallelism = config(stage, gradient_clipping="auto", train_batch_size="auto")
            train(optimizer, parallelism, duration="1ep", save=file, device_train_microbatch_size=4)
            # Another stage goes on.
            found[f"{optimizer} {stage}"] = train(optimizer, config(stage % 3 + 1), load_path=file)
        offloaded = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        found[f"offload {stage}"] = train("AdamW", {"deepspeed": {"zero_optimization": offloaded}})
    found["methods"] = train("AdamW", config(2), methods())
    found["methods, DDP"] = train("AdamW", None, methods())
    found["bf16"] = train("AdamW", config(2), precision="amp_bf16")
    found["bf16, DDP"] = train("AdamW", None, precision="amp_bf16")
    found["bf16 weights"] = train("AdamW", config(1, bf16={"enabled": True}), precision="amp_bf16")
    saves = {"save_folder": folder, "run_name": "killed", "save_interval": "1ba", "autoresume": True}
    with closing(make_trainer("AdamW", config(3), callbacks=Death(), **saves)) as trainer, suppress(InterruptedError):
        trainer.fit()
    found["killed"] = train("AdamW", config(3), **saves)
    clipped = config(2, gradient_clipping=0.1)
    found["clipped"] = train("SGD", clipped)
    trainer = make_trainer("AdamW", config(3))
    trainer.close()
    with pytest.raises(RuntimeError, match="are in shards, which only the `Trainer` could gather, and it is closed"):
        trainer.state.model.state_dict()
    found["clipped, DDP"] = train("SGD", None, (GradientClipping("norm", 0.1),))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Weights], Path]:
    folder = tmp_path_factory.mktemp("runs")
    first, second = run_on_ranks(run_all, 2, str(folder), backend=None)
    deep_compare(first, second)
    return first, folder


def assert_close(actual: Weights, expected: Weights, tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_in_two_stages_train_as_one_process(
    found: tuple[dict[str, Weights], Path], optimizer: str, stage: int
) -> None:
    """The runs had two microbatches, schedules, a frozen layer and evaluations, and went on in another stage."""
    alone = train(optimizer)

    assert_close(found[0][f"{optimizer} {stage}"], alone)
    with pytest.warns(UserWarning, match="The random state was saved by 2 processes, but 1 are running"):
        assert_close(train(optimizer, load_path=str(found[1] / f"{optimizer}{stage}.pt")), alone)


@pytest.mark.parametrize("stage", STAGES)
def test_states_in_host_memory_change_nothing(found: tuple[dict[str, Weights], Path], stage: int) -> None:
    assert_close(found[0][f"offload {stage}"], train("AdamW"))


def test_a_run_that_died_goes_on_by_itself(found: tuple[dict[str, Weights], Path]) -> None:
    assert_close(found[0]["killed"], train("AdamW"))


@pytest.mark.parametrize("name", ["methods", "bf16", "clipped"])
def test_it_equals_ddp(found: tuple[dict[str, Weights], Path], name: str) -> None:
    assert_close(found[0][name], found[0][f"{name}, DDP"], 1e-5)


def test_weights_in_bf16_have_copies_in_fp32(found: tuple[dict[str, Weights], Path]) -> None:
    assert {tensor.dtype for tensor in found[0]["bf16 weights"].values()} == {torch.float32, torch.bfloat16}
    assert found[0]["bf16 weights"]["3.weight"].dtype is torch.bfloat16  # it is not trained, so it has no copy
    for name, tensor in found[0]["bf16 weights"].items():
        torch.testing.assert_close(tensor.float(), found[0]["bf16"][name], rtol=0, atol=0.05)


def test_a_checkpoint_is_that_of_one_process(found: tuple[dict[str, Weights], Path], tmp_path: Path) -> None:
    train("AdamW", duration="1ep", save=str(tmp_path / "alone.pt"))
    alone = read_checkpoint(tmp_path / "alone.pt")["state"]
    for stage in STAGES:
        saved = read_checkpoint(found[1] / f"AdamW{stage}.pt")["state"]
        for part in ("model", "optimizers", "schedulers"):
            deep_compare(saved[part], alone[part], atol=1e-6, rtol=0)


def test_the_model_can_be_copied() -> None:
    """As an export does, in one process."""
    with closing(make_trainer("AdamW", config(2))) as trainer:
        trainer.fit()
        assert_close(copy.deepcopy(trainer.state.model).state_dict(), trainer.state.model.state_dict(), 0.0)


# ---- refusals, in one process ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must have a 'stage' of 1, 2 or 3, got None"),
        ({"zero_optimization": {"stage": 0}}, "DDP is the default"),
        (
            {"zero_optimization": {"stage": 4}, "optimizer": {}, "scheduler": {}},
            "'optimizer' .* 'scheduler' .* 'stage'",
        ),
        (
            {"zero_optimization": {"stage": 1}, "bf16": True},
            "'bf16' must be a dict such as {'enabled': True}, got True",
        ),
        (
            {**config(1)["deepspeed"], "train_batch_size": 8, "gradient_accumulation_steps": "auto"},
            "wrong. 'train_batch_size' must not be there. It follows from the loader .* or write 'auto'.$",
        ),
        (3, "must be a dict or the path of one, got 3"),
    ],
)
def test_a_wrong_configuration_is_refused_at_once(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        DeepSpeed(given)


def test_a_precision_may_be_auto() -> None:
    deepspeed = DeepSpeed({**config(1)["deepspeed"], "bf16": "auto", "fp16": "auto"})
    deepspeed.check_precision(Precision.AMP_BF16)  # as if both were left out
    assert deepspeed._config == {**config(1)["deepspeed"], "fp16": {"enabled": False}, "bf16": {"enabled": False}}


def test_a_configuration_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config(2)["deepspeed"]))
    assert DeepSpeed(path)._config == config(2)["deepspeed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithms": (SAM(), GradientClipping("norm", 1.0))},
            r"`SAM`: DeepSpeed steps .* `GradientClipping`: The gr",
        ),
        ({"algorithms": (EMA(),), "parallelism": config(3)}, r"`EMA`: With stage 3, no rank has whole weights"),
        (
            {"parallelism": config(1, fp16={"enabled": True})},
            r"`precision` is 'fp32', but .*'fp16': \{'enabled': True",
        ),
        ({"parallelism": config(1, bf16={"enabled": True})}, r"`precision` is 'fp32', but .*'bf16'"),
        ({"optimizer": "Adafactor"}, r"must treat each weight alike with DeepSpeed, .* got Adafactor. Use AdamW"),
        (
            {"deepspeed_config": config(1)["deepspeed"]},
            "`parallelism_config` and `deepspeed_config` exclude each other",
        ),
    ],
)
def test_what_contradicts_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**{"parallelism": config(1), **options})
