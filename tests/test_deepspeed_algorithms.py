"""Every algorithm with DeepSpeed on two ranks: it gives the weights that DDP gives, or is refused with the reason."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from algorithm_runs import ARGUMENTS, CLASSES, LANGUAGE, LOWER_PRECISION, Captioned, Classifier, captioned, make, noise
from torch.utils.data import DataLoader

from composer import Trainer
from composer.testing import run_on_ranks
from composer.utils import dist

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="DeepSpeed compiles its exchange between processes on a CPU: needs g++"
)
REFUSED = {
    1: "CautiousDecay ChannelsLast EMANesterov GradientClipping Hyperball LayerFreezing Muon PostHocEMA SAM SOAP SWA "
    "ScheduleFree Whitening",
    3: "ChunkedCrossEntropy EMA LAWA",
}


def train(name: str, stage: int | None) -> dict[str, torch.Tensor]:
    """Train three epochs of one batch per rank; with DDP if the stage is None."""
    kind = Captioned if name in LANGUAGE else Classifier
    model = kind(norm=partial(torch.nn.GroupNorm, 2), dropout=0.0)
    keys = {"input_key": "image", "target_key": "label"} if name in LANGUAGE else {}
    images = noise(16)
    sampler = dist.get_sampler(images, shuffle=False)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(
            images, batch_size=8, sampler=sampler, collate_fn=captioned if name in LANGUAGE else None
        ),
        max_duration="3ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=make(name, keys, ARGUMENTS.get(name, {})),
        parallelism_config=None if stage is None else {"deepspeed": {"zero_optimization": {"stage": stage}}},
        precision="amp_bf16" if name in LOWER_PRECISION else "fp32",
        progress_bar=False,
        device="cpu",
        seed=3,
    )
    try:
        trainer.fit()
        return {key: tensor.clone() for key, tensor in trainer.state.get_model_state_dict().items()}
    finally:
        trainer.close()


def run_all() -> dict[tuple[str, int], Any]:
    """Return the largest difference of a weight to DDP, or the reason of the refusal, by algorithm and stage."""
    found: dict[tuple[str, int], Any] = {}
    for name in CLASSES:
        expected: dict[str, torch.Tensor] = {}
        for stage in (2, 3):
            try:
                actual = train(name, stage)
            except ValueError as error:
                found[name, stage] = str(error)
                continue
            expected = expected or train(name, None)
            assert actual.keys() == expected.keys()
            found[name, stage] = max((actual[key] - tensor).abs().max().item() for key, tensor in expected.items())
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], Any]:
    return run_on_ranks(run_all, 2, backend=None)[0]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_it_trains_as_with_ddp_or_is_refused(found: dict[tuple[str, int], Any], name: str, stage: int) -> None:
    refused = {each for least, names in REFUSED.items() if stage >= least for each in names.split()}
    outcome = found[name, stage]
    if name in refused:
        assert f"`algorithms` cannot all run with DeepSpeed. `{name}`: " in outcome
    else:
        assert outcome < 1e-5
