"""Optimizers that take turns in every batch, as those of a GAN, against a loop written by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import FSDP, gap, needs_sharding, trained
from shared_runs import Overflowing
from torch.nn.functional import softplus

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.testing import deep_compare, run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist
from composer.utils.reproducibility import seed_context


def network(*widths: int) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class GAN(ComposerModel):
    """Batches hold real points and noise; with `noise`, the noise is drawn instead."""

    def __init__(self, width: int = 8, noise: int | None = None) -> None:
        super().__init__()
        self.noise, self.turn = noise, 0
        with seed_context(3):
            self.discriminator, self.generator = network(2, width, width, 1), network(noise or 3, width, width, 2)

    def begin_turn(self, turn: int) -> None:
        self.turn = turn

    def forward(self, batch: Any) -> Any:
        return self.generator(torch.randn(len(batch[0]), self.noise) if self.noise else batch[1])

    def loss(self, fake: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.turn == 1:
            return {"generator": softplus(-self.discriminator(fake)).mean()}
        real, fake = self.discriminator(batch[0]), self.discriminator(fake.detach())
        return {"discriminator": softplus(-real).mean() + softplus(fake).mean()}


def optimizers_of(gan: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(gan.discriminator.parameters(), lr=0.01),
        torch.optim.SGD(gan.generator.parameters(), lr=0.05, momentum=0.9),
    ]


def data(count: int = 6, rows: int = 8, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype) for width in (2, 3))
        for _ in range(count)
    ]


def by_hand(gan: GAN, batches: list[Any], size: int, clip: float | None) -> None:
    discriminator, generator = optimizers_of(gan)
    for batch in batches:
        for turn, optimizer in enumerate((discriminator, generator)):
            gan.begin_turn(turn)
            gan.zero_grad()
            parts = list(zip(*(tensor.split(size) for tensor in batch), strict=True))
            for part in parts:
                (loss,) = gan.loss(gan(part), part).values()
                (loss * (len(part[0]) / len(batch[0]))).backward()
            network = (gan.discriminator, gan.generator)[turn]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()


class Clips(Algorithm):
    """Clips all gradients, and notes the events of a batch."""

    def __init__(self, norm: float | None) -> None:
        self.norm = norm
        self.events: list[str] = []

    def match(self, event: Event, state: State) -> bool:
        return event.is_before_event or event.is_after_event

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if state.timestamp.batch == "0ba":
            self.events.append(event.value)
        if event is Event.AFTER_TRAIN_BATCH and self.norm is not None:
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), self.norm)


def run(gan: GAN, **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "optimizers": optimizers_of(gan),
        "train_dataloader": data(),
        "max_duration": "1ep",
        "device": "cpu",
        "progress_bar": False,
        "seed": 1,
    }
    trainer = Trainer(model=gan, **{**defaults, **kwargs})
    trainer.fit()
    trainer.close()
    return trainer


def weights(gan: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in gan.named_parameters()}


@pytest.mark.parametrize("size", [8, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_turns_equal_a_loop_written_by_hand(size: int, clip: float | None) -> None:
    expected, gan = GAN(), GAN()
    by_hand(expected, data(), size, clip)
    run(gan, device_train_microbatch_size=size, algorithms=Clips(clip))

    deep_compare(weights(expected), weights(gan))


def test_every_turn_has_the_events_of_a_pass() -> None:
    notes = Clips(None)
    run(GAN(), algorithms=notes, device_train_microbatch_size=4)
    passes = "before_forward after_forward before_loss after_loss before_backward after_backward".split()
    turn = ["before_train_batch", *passes, *passes, "after_train_batch"]

    assert [*turn, *turn] == [event for event in notes.events if event in turn]


def test_losses_of_all_turns_are_logged() -> None:
    gan, batch = GAN(), data()[0]
    discriminator = gan.loss(gan(batch), batch)["discriminator"]
    losses = run(gan, train_dataloader=[batch]).state.total_loss_dict

    assert {"loss/train/total", "loss/train/discriminator", "loss/train/generator"} == losses.keys()
    assert float(losses["loss/train/discriminator"]) == pytest.approx(discriminator.item())
    total, *parts = (float(losses[f"loss/train/{name}"]) for name in ("total", "discriminator", "generator"))
    assert sum(parts) == pytest.approx(total)


class Overflows(Algorithm):
    """Fills a gradient of the discriminator with infinity in the last batch but one, also in the generator's turn."""

    events = frozenset({Event.AFTER_BACKWARD})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = state.model
        if state.timestamp.batch == "7ba":
            model.discriminator[0].weight.grad.fill_(float("inf"))


def test_an_overflow_skips_the_turn_in_which_it_occurs() -> None:
    steps, scales = [], []
    for algorithms in (None, Overflows()):
        gan = GAN()
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (gan.discriminator, gan.generator)]
        # The scale of 2**16 overflows by itself at first.
        trainer = run(gan, optimizers=optimizers, precision="amp_fp16", algorithms=algorithms, train_dataloader=data(9))
        steps.append([max(int(state["step"]) for state in each.state.values()) for each in optimizers])
        scales.append(trainer.state.scaler.get_scale())
    (discriminator, generator), overflowing = steps

    assert [discriminator - 1, generator] == overflowing
    assert scales[0] == 2 * scales[1]


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_a_resumed_run_continues_identically(tmp_path: Path, precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "device_train_microbatch_size": 4, "max_duration": "2ep"}
    gan = GAN(noise=4)
    save: dict[str, Any] = {"save_interval": "1ba", "save_filename": "ba{batch}.pt"}
    expected = run(gan, save_folder=str(tmp_path), **save, **options)
    resumed = GAN(noise=4)
    with torch.no_grad():
        resumed.generator[0].weight.zero_()
    trainer = run(resumed, load_path=str(tmp_path / "ba7.pt"), **options)

    deep_compare(weights(gan), weights(resumed))
    deep_compare(expected.state.get_optim_state_dict(), trainer.state.get_optim_state_dict())


def mixture(size: int, seed: int) -> torch.Tensor:
    """Points near the corners of a square."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    chosen = torch.randint(4, (size,), generator=generator)
    return corners[chosen] + torch.randn(size, 2, generator=generator) * 0.1


def test_it_learns_a_mixture() -> None:
    gan = GAN(width=64, noise=4)
    parts = (gan.discriminator, gan.generator)
    run(
        gan,
        optimizers=[torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.99)) for part in parts],
        train_dataloader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(mixture(4096, seed=0)), batch_size=128, shuffle=True
        ),
        max_duration="30ep",
    )
    with torch.no_grad(), seed_context(5):
        made = gan.generator(torch.randn(1000, 4))
    near = (made.abs() - 1).norm(dim=1) < 0.4
    corners = mixture(200, seed=1).sign().unique(dim=0)
    shares = torch.stack([((made.sign() == corner).all(1) & near).float().mean() for corner in corners])

    assert near.float().mean() > 0.8
    assert shares.min() > 0.08, "every corner is found"


# ---- what cannot take turns


def test_an_optimizer_with_a_closure_is_refused() -> None:
    gan = GAN()
    optimizers = [Overflowing(gan.discriminator.parameters(), lr=0.1), torch.optim.SGD(gan.generator.parameters())]

    with pytest.raises(ValueError, match=r"must step without a closure for GAN, .*, got Overflowing"):
        run(gan, optimizers=optimizers)


class Adds(Algorithm):
    """Divides the parameters of the first optimizer, as `Muon` does."""

    events = frozenset({Event.INIT})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        group = state.optimizers[0].param_groups[0]
        taken = group["params"].pop()
        state.optimizers = [torch.optim.SGD([taken], lr=0.1), *state.optimizers]


def test_an_algorithm_that_adds_optimizers_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"number of optimizers of GAN, .*: 2 were given, and there are 3 now: SGD, AdamW, SGD",
    ):
        run(GAN(), algorithms=Adds())


# ---- several ranks


def train_on_ranks(config: Any) -> dict[str, Any]:
    gan = GAN().double()
    rows = slice(dist.get_global_rank(), None, dist.get_world_size())
    batches = [tuple(tensor[rows] for tensor in batch) for batch in data(dtype=torch.float64)]
    return trained(
        config,
        model=gan,
        optimizers=optimizers_of(gan),
        train_dataloader=batches,
        max_duration="1ep",
        schedulers=None,
        device_train_microbatch_size=2,
        algorithms=Clips(0.1) if config is None else None,
    )


def train_both_ways() -> list[dict[str, Any]]:
    return [train_on_ranks(config) for config in (None, FSDP)]


@needs_sharding
def test_two_ranks_equal_one_process() -> None:
    ranks = run_on_ranks(train_both_ways, 2)
    for number, algorithms in enumerate((Clips(0.1), None)):
        gan = GAN().double()
        expected = trained(
            model=gan,
            optimizers=optimizers_of(gan),
            train_dataloader=data(dtype=torch.float64),
            max_duration="1ep",
            schedulers=None,
            algorithms=algorithms,
        )
        assert max(gap(expected, results[number]) for results in ranks) < 1e-12


def test_one_optimizer_cannot_take_turns() -> None:
    gan = GAN()
    with pytest.raises(
        ValueError, match="`optimizers` must be a list of at least two for GAN, which defines `begin_turn`, got one"
    ):
        Trainer(
            model=gan, optimizers=torch.optim.SGD(gan.parameters(), lr=0.1), train_dataloader=data(), max_duration="1ep"
        )
    with pytest.warns(UserWarning, match="No optimizer was specified"):
        Trainer(model=gan)  # to evaluate
