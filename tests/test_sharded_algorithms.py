"""Algorithms on models that are divided among ranks, against the same runs with `DistributedDataParallel`."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import record_stack

from composer import Trainer
from composer.algorithms import (
    EMA,
    LAWA,
    SAM,
    SWA,
    BlurPool,
    CautiousDecay,
    Distillation,
    Factorize,
    GradientClipping,
    Hyperball,
    LayerFreezing,
    MixUp,
    Muon,
    ScheduleFree,
    SqueezeExcite,
)
from composer.checkpoint.sharded_tensors import gather_tensors
from composer.core import Algorithm, Callback
from composer.models import ComposerModel
from composer.optim import DecoupledAdamW, LinearScheduler
from composer.testing import run_on_ranks
from composer.utils import dist
from composer.utils.reproducibility import seed_context

# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
pytestmark = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` needs a GPU")
TOLERANCE = 1e-10
BATCHES, ROWS, CLASSES = 10, 8, 3
FSDP: dict[str, Any] = {"fsdp": {}}
IMAGES = torch.randn(BATCHES, ROWS, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.randint(CLASSES, (BATCHES, ROWS), generator=torch.Generator().manual_seed(1))

Algorithms = Callable[[], list[Algorithm]]


def _averages() -> list[Algorithm]:
    return [
        EMA(half_life=None, smoothing=0.9, update_interval="1ba"),
        GradientClipping(clipping_type="norm", clipping_threshold=0.1),
        MixUp(alpha=0.2),
        SAM(rho=0.05, sync_ascent=True),
    ]


CASES: dict[str, Algorithms] = {
    "EMA": lambda: [EMA(half_life=None, smoothing=0.9, update_interval="1ba")],
    "SWA": lambda: [SWA(swa_start="0.2dur", swa_end="0.8dur", update_interval="1ba", schedule_swa_lr=False)],
    "LAWA": lambda: [LAWA(num_snapshots=3, interval="1ba")],
    "SAM": lambda: [SAM(rho=0.05, sync_ascent=True)],
    "MixUp": lambda: [MixUp(alpha=0.2)],
    "clipping by norm": lambda: [GradientClipping(clipping_type="norm", clipping_threshold=0.05)],
    "clipping by value": lambda: [GradientClipping(clipping_type="value", clipping_threshold=0.01)],
    "clipping by unit": lambda: [GradientClipping(clipping_type="adaptive", clipping_threshold=0.01)],
    "all of them": _averages,
    "surgery": lambda: [BlurPool(), SqueezeExcite(latent_channels=4, min_channels=4), Factorize(latent_features=2)],
    "freezing": lambda: [LayerFreezing(freeze_start=0.2, freeze_level=0.5)],
    "Muon": lambda: [Muon(lr=0.01, weight_decay=0.1)],
    "pinned and decayed": lambda: [Hyperball(lr=0.02), CautiousDecay(1.0)],
    "the stack of records": record_stack,
    "ScheduleFree": lambda: [ScheduleFree(lr=0.02, recalibration_batches=0)],
    "Distillation": lambda: [Distillation(_teacher(), weight=0.7)],
}
RESUMED = {name: (name, FSDP) for name in ("all of them", "surgery", "SWA", "LAWA", "the stack of records")}
RESUMED["the stack of records from a folder"] = "the stack of records", {"fsdp": {"state_dict_type": "sharded"}}
CONSTANT = {"ScheduleFree"}  # cases that need a rate without a schedule, and an optimizer of torch


class Convolutions(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(2, 8, 3, padding=1),
            torch.nn.Tanh(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 8, 3, stride=2, padding=1),
            torch.nn.Tanh(),
        )
        self.head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 16), torch.nn.Linear(16, CLASSES))

    def forward(self, batch: Any) -> Any:
        return self.head(self.features(batch[0]))

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def _teacher() -> ComposerModel:
    with seed_context(5):
        return Convolutions().double()


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.values.append(float(state.total_loss_dict["loss/train/total"]))


def run(
    algorithms: list[Algorithm], config: Any, seed: int = 0, constant: bool = False, **kwargs: Any
) -> tuple[list[float], dict[str, Any]]:
    """The losses of a run, and what it would save of its weights and averages."""
    torch.manual_seed(seed)
    model, losses = Convolutions().double(), Losses()
    size = ROWS // dist.get_world_size()
    rows = slice(dist.get_global_rank() * size, (dist.get_global_rank() + 1) * size)
    trainer = Trainer(
        model=model,
        train_dataloader=[(IMAGES[i, rows], LABELS[i, rows]) for i in range(BATCHES)],
        max_duration=f"{BATCHES}ba",
        optimizers=(torch.optim.AdamW if constant else DecoupledAdamW)(model.parameters(), lr=0.01),
        schedulers=None if constant else LinearScheduler(alpha_f=0.5),
        algorithms=algorithms,
        callbacks=losses,
        device="cpu",
        progress_bar=False,
        seed=3,
        parallelism_config=config,
        **kwargs,
    )
    trainer.fit()
    saved = trainer.state.state_dict()
    kept = gather_tensors({"model": saved["model"], "algorithms": saved["algorithms"]})
    trainer.close()
    return losses.values, dict(_tensors(kept))


def _tensors(value: Any, path: str = "") -> Any:
    if isinstance(value, torch.Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, dict):
        for key, item in value.items():
            # As `DistributedDataParallel` names them, and as they are.
            yield from _tensors(item, f"{path}/{str(key).removeprefix('module.')}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}/{index}")


def gap(one: Any, other: Any) -> float:
    assert one[1].keys() == other[1].keys()
    return max(
        *(abs(a - b) for a, b in zip(one[0], other[0], strict=True)),
        *((one[1][name] - other[1][name]).abs().max().item() for name in one[1] if one[1][name].numel()),
    )


def on_two(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, algorithms in CASES.items():
        try:
            constant = name in CONSTANT
            found[name] = gap(*(run(algorithms(), config, constant=constant) for config in (FSDP, None)))
        except Exception:  # noqa: BLE001  # the test of this case raises it
            found[name] = AssertionError(traceback.format_exc())
    for name, (case, config) in RESUMED.items():
        whole = run(CASES[case](), config, save_folder=f"{folder}/{name}", save_interval="5ba")
        (path,) = Path(folder, name).glob("ep0-ba5*")  # a file, or a folder
        # What changed the layers is applied because the checkpoint needs it, before they are divided.
        applied = [] if case == "surgery" else CASES[case]()
        found[f"{name} resumed"] = whole, run(applied, config, seed=7, load_path=str(path))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(on_two, 2, str(tmp_path_factory.mktemp("checkpoints")), timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_an_algorithm_acts_on_shards_as_on_whole_weights(two: list[dict[str, Any]], case: str) -> None:
    for found in two:
        if isinstance(found[case], AssertionError):
            raise found[case]
        assert found[case] < TOLERANCE


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_with_algorithms_resumes(two: list[dict[str, Any]], case: str) -> None:
    for found in two:
        (losses, final), (rest, resumed) = found[f"{case} resumed"]
        assert losses[5:] == pytest.approx(rest, abs=TOLERANCE)
        assert final.keys() == resumed.keys()
        for name, tensor in resumed.items():
            torch.testing.assert_close(tensor, final[name], rtol=0, atol=TOLERANCE)
