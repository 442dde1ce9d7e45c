"""Every algorithm in two replica groups of torchft: it gives the weights that DDP gives, or is refused."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from algorithm_runs import ARGUMENTS, CLASSES, LANGUAGE, LOWER_PRECISION, Captioned, Classifier, captioned, make, noise
from torch.utils.data import DataLoader

from composer import Trainer
from composer.testing import run_on_ranks
from composer.torchft import TorchFT
from composer.utils import dist

coordination = pytest.importorskip("torchft.coordination", reason="torchft has wheels for Linux only")
REFUSED = "BatchSizeWarmup EMANesterov SAM"


class Watched(TorchFT):
    """Checks that a group that joins while gradients are averaged gets the weights from before the batch."""

    def begin_batch(self) -> None:
        super().begin_batch()
        self.before = [parameter.detach().clone() for parameter in self._state.model.parameters()]

    def average_gradients(self) -> None:
        for before, parameter in zip(self.before, self._state.model.parameters(), strict=True):
            assert torch.equal(before, parameter)
        super().average_gradients()


def train(name: str, part: int, parallelism: Any) -> dict[str, torch.Tensor]:
    """Train three epochs of one batch per rank or group."""
    kind = Captioned if name in LANGUAGE else Classifier
    model = kind(norm=partial(torch.nn.GroupNorm, 2), dropout=0.0)
    keys = {"input_key": "image", "target_key": "label"} if name in LANGUAGE else {}
    images = noise(16)
    sampler = dist.get_sampler(images, shuffle=False, num_replicas=2, rank=part)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(
            images, batch_size=8, sampler=sampler, collate_fn=captioned if name in LANGUAGE else None
        ),
        max_duration="3ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=make(name, keys, ARGUMENTS.get(name, {})),
        parallelism_config=parallelism,
        precision="amp_bf16" if name in LOWER_PRECISION else "fp32",
        dist_timeout=60,
        progress_bar=False,
        device="cpu",
        seed=3,
    )
    try:
        trainer.fit()
        return {key: tensor.clone() for key, tensor in trainer.state.get_model_state_dict().items()}
    finally:
        trainer.close()


def run_all(lighthouse: str | None) -> dict[str, Any]:
    """Return the weights or the reason of the refusal, by algorithm; without a Lighthouse, with DDP."""
    part, strategy = int(os.environ["RANK"]), None
    if lighthouse is not None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]  # each process is a group of its own
        os.environ["RUST_LOG"] = "error"
        strategy = {"groups": 2, "group": part, "lighthouse": lighthouse}
    found: dict[str, Any] = {}
    for name in CLASSES:
        try:
            found[name] = train(name, part, None if strategy is None else Watched(strategy))
        except (AssertionError, ValueError) as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], dict[str, Any]]:
    # The groups of each run are gone for the next one after half a second.
    server = coordination.LighthouseServer(bind="[::]:0", min_replicas=1, heartbeat_timeout_ms=500)
    try:
        first, second = run_on_ranks(run_all, 2, server.address(), backend=None)
    finally:
        server.shutdown()
    for name in CLASSES:
        assert isinstance(first[name], str) == isinstance(second[name], str)
    return first, run_on_ranks(run_all, 2, None, backend=None)[0]


@pytest.mark.parametrize("name", CLASSES)
def test_it_trains_as_with_ddp_or_is_refused(found: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    actual, expected = found[0][name], found[1][name]
    if name in REFUSED.split():
        assert f"`algorithms` cannot all run with Watched. `{name}`: " in actual
        return
    assert not isinstance(actual, str), actual
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=0, atol=1e-5)
