"""A GAN with averaged weights: a loop of one's own and Lightning's manual optimization equal our `Trainer`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms import EMA, SAM, SOAP, EMANesterov, GradientClipping, MixUp, Muon, StochasticDepth
from composer.core import ConflictError
from composer.hosts.lightning import ComposeCallback
from composer.loop import HostedRun
from composer.models import ComposerModel
from composer.testing import deep_compare
from composer.trainer import Trainer
from composer.utils.reproducibility import seed_context

SEED, EPOCHS = 7, 2
REFUSED = [MixUp(), SAM(), GradientClipping("norm", 1.0), EMANesterov()]


class GAN(ComposerModel):
    """Two networks for points of a plane."""

    def __init__(self) -> None:
        super().__init__()
        with seed_context(3):
            self.discriminator = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
            self.generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def begin_turn(self, turn: int) -> None:
        self.turn = turn

    def forward(self, batch: Any) -> Any:
        return self.generator(torch.randn(len(batch[0]), 3))

    def loss(self, fake: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.turn == 1:
            return softplus(-self.discriminator(fake)).mean()
        real, fake = self.discriminator(batch[0]), self.discriminator(fake.detach())
        return softplus(-real).mean() + softplus(fake).mean()

    def losses(self, batch: Any) -> Iterator[torch.Tensor]:
        for turn in (0, 1):
            self.begin_turn(turn)
            yield self.loss(self(batch), batch)


def optimizers_of(gan: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(gan.discriminator.parameters(), lr=0.01),
        torch.optim.SGD(gan.generator.parameters(), lr=0.05, momentum=0.9),
    ]


def data() -> Any:
    """With a generator, a loader draws nothing from the global ones, which hosts iterate it with."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(32, 2, generator=generator)), batch_size=8, generator=generator)


def averages() -> EMA:
    return EMA(half_life="3ba")


def with_trainer() -> GAN:
    gan = GAN()
    trainer = Trainer(
        model=gan,
        algorithms=averages(),
        optimizers=optimizers_of(gan),
        train_dataloader=data(),
        max_duration=f"{EPOCHS}ep",
        seed=SEED,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return gan


def with_a_loop() -> GAN:
    gan = GAN()
    optimizers = optimizers_of(gan)
    run = HostedRun(
        gan,
        averages(),
        optimizers=optimizers,
        dataloader=data(),
        max_duration=f"{EPOCHS}ep",
        manual=True,
        seed=SEED,
    )
    run.begin_fit()
    while not run.is_over():
        for batch in run.epoch():
            for loss, optimizer in zip(gan.losses(batch), optimizers, strict=True):
                gan.zero_grad()
                loss.backward()
                optimizer.step()
            run.end_batch()
    run.end_fit()
    assert run.state.timestamp.batch == 8
    return gan


class Adversarial(pl.LightningModule):
    """The GAN in a module of Lightning."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.gan = GAN()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for loss, optimizer in zip(self.gan.losses(batch), self.optimizers(), strict=True):  # type: ignore[arg-type]
            self.gan.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return optimizers_of(self.gan)


def fit(module: pl.LightningModule, algorithms: Any, checkpoint: Any = None, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        callbacks=[ComposeCallback(algorithms, seed=SEED)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data(), ckpt_path=checkpoint, weights_only=checkpoint is None)
    return trainer


def weights(gan: GAN) -> dict[str, torch.Tensor]:
    return copy.deepcopy(dict(gan.named_parameters()))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_averages_of_a_gan_are_equal_in_all_loops(tmp_path: Any) -> None:
    expected, module, resumed = weights(with_trainer()), Adversarial(), Adversarial()
    fit(module, averages(), max_epochs=EPOCHS)
    fit(Adversarial(), averages(), max_epochs=1).save_checkpoint(tmp_path / "file.ckpt")
    fit(resumed, averages(), tmp_path / "file.ckpt", max_epochs=EPOCHS)

    deep_compare(expected, weights(with_a_loop()))
    deep_compare(expected, weights(module.gan))
    deep_compare(expected, weights(resumed.gan))


def test_what_acts_on_losses_and_gradients_is_refused_at_once() -> None:
    gan = GAN()
    words = "(?s)5 problems.*`accumulate`.*`MixUp` acts at.*`begin_turn`.*`SAM` wraps.*`GradientCl.*`EMANesterov`"
    with pytest.raises(ConflictError, match=words):
        HostedRun(gan, [averages(), *REFUSED], max_duration="1ep", manual=True, accumulate=2)
    with pytest.raises(ConflictError, match=r"(?s)3 problems.*`Muon` .*holds the optimizers.*`SOAP` "):
        HostedRun(gan, [Muon(), SOAP()], max_duration="1ep", manual=True)
    HostedRun(gan, [averages(), StochasticDepth("ResNetBottleneck")], max_duration="1ep", manual=True)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_manual_optimization_of_lightning_refuses_at_once() -> None:
    words = r"(?s)4 problems.*`max_steps` must not.*`SAM` wraps.*`GradientCl.*`EMANesterov`"
    with pytest.raises(ConflictError, match=words):
        fit(Adversarial(), [averages(), *REFUSED[1:]], max_epochs=1, max_steps=3)


def test_a_manual_loop_calls_no_phases_of_a_pass() -> None:
    gan = GAN()
    run = HostedRun(gan, optimizers=optimizers_of(gan), dataloader=data(), max_duration="1ep", manual=True)
    run.begin_fit()
    with pytest.raises(RuntimeError, match="With `manual=True` the loop computes losses and gradients itself"):
        run.loss(next(iter(run.epoch())))
    with pytest.raises(RuntimeError, match="With `manual=True` the loop computes losses and gradients itself"):
        run.step()
    run.abort()
    run.begin_fit()
    with pytest.raises(RuntimeError, match="Call `end_batch` for each batch"):
        for _ in run.epoch():
            pass
