"""`Whitening` with the engine and the Trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.algorithms.whitening import Whitening, WhiteningConv2d, compute_whitening_filters
from composer.core import STANDARDIZES_WEIGHTS, Algorithm, Engine, Event, Placement, State, Time
from composer.datasets.device_loader import DeviceLoader
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.testing import SimpleModel, deep_compare, run_on_ranks
from composer.utils import dist

SIZE = 24
IMAGES = torch.randn(SIZE, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(SIZE) % 2
FILTERS = compute_whitening_filters(IMAGES).float()


class Classifier(ComposerModel):
    def __init__(self, bias: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = torch.nn.Conv2d(3, 24, 2, bias=bias)
        self.head = torch.nn.Linear(24, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.nn.functional.gelu(self.conv(batch[0])).mean((2, 3)))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def loader_of(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES, LABELS), **{"batch_size": 8, "shuffle": True, **options})


def start(loader: Any, algorithm: Algorithm, *events: str) -> tuple[State, Engine]:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, max_duration="9ep", dataloader=loader, optimizers=optimizer, algorithms=algorithm)
    engine = Engine(state)
    for event in events or ("init", "before_load"):
        engine.run_event(event)
    return state, engine


def conv_of(state: State) -> WhiteningConv2d:
    (found,) = (module for module in state.model.modules() if isinstance(module, WhiteningConv2d))
    return found


def assert_whitened(state: State, filters: torch.Tensor = FILTERS) -> None:
    torch.testing.assert_close(filters, conv_of(state).weight.detach())


# ---- the images ----


def test_the_filters_are_those_of_the_training_images() -> None:
    state, _ = start(loader_of(), Whitening())

    assert_whitened(state)
    assert conv_of(state).is_whitened


def test_fewer_images_are_spread_over_the_data_set() -> None:
    state, _ = start(loader_of(), Whitening(num_images=5))

    assert_whitened(state, compute_whitening_filters(IMAGES[[0, 4, 9, 14, 19]]).float())


class Random(Dataset[Any]):
    """Images with noise of every generator."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        return IMAGES[index] + noise, LABELS[index]


def test_generators_and_positions_of_loaders_do_not_move() -> None:
    loader = DataLoader(Random(), batch_size=8, shuffle=True)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    algorithm = Whitening()
    state = State(model=Classifier(), max_duration="1ep", dataloader=loader, algorithms=algorithm)
    torch.manual_seed(1)  # which the model moved
    for event in ("init", "before_load", "fit_start"):
        Engine(state).run_event(event)

    assert expected == (torch.rand(3).tolist(), random.random(), np.random.rand())  # noqa: NPY002


def test_a_loader_that_saves_its_position_keeps_it() -> None:
    loader, other = (DeviceLoader(IMAGES, LABELS, batch_size=8, seed=3) for _ in range(2))
    state, _ = start(loader, Whitening())

    assert_whitened(state)
    for _ in range(2):
        deep_compare([*other], [*loader])
    next(iter(loader))
    position = loader.state_dict()
    start(loader, Whitening(num_images=5))
    deep_compare(position, loader.state_dict())


def test_batches_of_a_list_and_images_at_other_keys_are_read() -> None:
    batches = [{"x": images, "y": labels} for images, labels in zip(IMAGES.split(5), LABELS.split(5), strict=True)]
    state, _ = start(batches, Whitening(num_images=7, input_key="x"))

    assert_whitened(state, compute_whitening_filters(IMAGES[:7]).float())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(IMAGES)


def test_images_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(TypeError, match=r"without moving the position.*got DataLoader.*call `apply_whitening`"):
        start(DataLoader(Stream()), Whitening())
    with pytest.raises(TypeError, match=r"must be a floating tensor.*got torch.uint8"):
        start([(IMAGES.to(torch.uint8), LABELS)], Whitening())
    with pytest.raises(RuntimeError, match=r"there is no training loader"):
        start(None, Whitening(), "init")[0].algorithms[0].apply(Event.FIT_START, State(model=_whitening_model()), None)  # type: ignore[arg-type]


def _whitening_model() -> Classifier:
    model = Classifier()
    model.conv = WhiteningConv2d(model.conv)
    return model


# ---- the layer in a run ----


def test_the_bias_trains_for_its_duration_and_leaves_the_optimizer() -> None:
    state, engine = start(loader_of(), Whitening(bias_duration="2ep"))
    optimizer, bias = state.optimizers[0], conv_of(state).bias
    assert bias is not None
    for epoch in range(3):
        assert epoch < 3
        engine.run_event("batch_start")
        held = {id(p) for p in optimizer.param_groups[0]["params"]}
        assert (epoch < 2) == bias.requires_grad == (id(bias) in held)
        assert id(conv_of(state).weight) not in held
        state.timestamp = state.timestamp.to_next_batch(SIZE).to_next_epoch()

    assert bias.grad is None


def test_a_loader_that_is_given_to_fit_is_read_then() -> None:
    model = Classifier()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=Whitening(),
        max_duration="1ba",
        progress_bar=False,
        device="cpu",
    )
    assert not conv_of(trainer.state).is_whitened
    trainer.fit(train_dataloader=loader_of())

    assert_whitened(trainer.state)


def train(duration: str, folder: Path | None = None, seed: int = 0, data: Any = None, **arguments: Any) -> State:
    model = Classifier(bias=False, seed=seed)
    torch.manual_seed(seed)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_dataloader=loader_of() if data is None else data,
        algorithms=Whitening(bias_duration="5ba", num_images=7),
        max_duration=duration,
        progress_bar=False,
        device="cpu",
        seed=4,
        **({} if folder is None else {"save_folder": str(folder), "save_interval": "1ba", "run_name": "run"}),
        **arguments,
    )
    trainer.fit()
    trainer.close()
    return trainer.state


@pytest.mark.parametrize("death", ["2ba", "5ba", "7ba"])
def test_a_resumed_run_equals_an_uninterrupted_one(death: str, tmp_path: Path) -> None:
    expected = train("3ep")
    train(death, tmp_path)
    resumed = train("3ep", seed=1, load_path=str(tmp_path / "latest-rank0.pt"))

    deep_compare(expected.state_dict()["model"], resumed.state_dict()["model"])
    deep_compare(expected.state_dict()["optimizers"], resumed.state_dict()["optimizers"])


def test_loaded_filters_are_kept_whatever_the_data(tmp_path: Path) -> None:
    first = train("1ep", tmp_path)
    others = [(100 * IMAGES, LABELS)]
    second = train("1ep", data=others, load_path=str(tmp_path / "latest-rank0.pt"), load_weights_only=True)

    assert torch.equal(conv_of(first).weight, conv_of(second).weight)


def test_a_second_run_of_the_model_keeps_the_filters() -> None:
    state, _ = start(loader_of(), Whitening())
    again = State(model=state.model, max_duration="1ep", dataloader=[(2 * IMAGES, LABELS)], algorithms=Whitening())
    again.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.1)  # type: ignore[assignment]
    for event in ("init", "before_load", "fit_start"):
        Engine(again).run_event(event)

    assert_whitened(again)
    assert id(conv_of(again).weight) not in {id(p) for p in again.optimizers[0].param_groups[0]["params"]}


def _whiten_own_data() -> torch.Tensor:
    images = IMAGES + dist.get_global_rank()
    state, _ = start([(images, LABELS)], Whitening())
    return conv_of(state).weight.detach()


def _whiten_bytes_on_the_first_rank() -> str:
    images = IMAGES.to(torch.uint8) if dist.get_global_rank() == 0 else IMAGES
    try:
        start([(images, LABELS)], Whitening())
    except TypeError as error:
        return str(error)
    return ""


def test_all_ranks_have_the_filters_of_the_first() -> None:
    first, second = run_on_ranks(_whiten_own_data, 2)

    assert torch.equal(first, second)
    torch.testing.assert_close(FILTERS, first)


def test_an_error_on_the_first_rank_is_one_on_all() -> None:
    for message in run_on_ranks(_whiten_bytes_on_the_first_rank, 2):
        assert "must be a floating tensor" in message


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_it_trains_in_every_precision(precision: str) -> None:
    before = train("1ba", precision=precision)
    state = train("2ep", precision=precision)

    assert torch.equal(conv_of(before).weight, conv_of(state).weight)
    assert all(torch.isfinite(p).all() for p in state.model.parameters())


class Standardized(Algorithm):
    """A method that computes weights from weights."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={STANDARDIZES_WEIGHTS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


def test_standardized_weights_are_refused() -> None:
    state = State(model=Classifier(), algorithms=[Whitening(), Standardized()])
    with pytest.raises(ValueError, match=r"Whitening.*Standardized|Standardized.*Whitening"):
        Engine(state).run_event("init")


def test_it_is_required_on_load_and_idle_without_a_convolution() -> None:
    assert Whitening.required_on_load()
    state = State(model=SimpleModel(), max_duration="1ep", algorithms=Whitening())
    with pytest.warns(NoEffectWarning, match=r"`Whitening` will have no effect: the model has no `Conv2d`"):
        Engine(state).run_event("init")


def test_wrong_arguments_are_refused_at_construction() -> None:
    assert "3ep" == Whitening(bias_duration=Time(3, "ep")).bias_duration
    assert not Whitening(bias_duration=None).find_unused_parameters
    with pytest.raises(TypeError, match=r"`bias_duration` must be a time string, a `Time` or None, got 3"):
        Whitening(bias_duration=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`bias_duration` must not be negative, got '-1ep'"):
        Whitening(bias_duration="-1ep")
    with pytest.raises(ValueError, match=r"`num_images` must be at least 1, got 0|`num_images` must be positive"):
        Whitening(num_images=0)


def test_a_function_may_make_the_optimizer() -> None:
    def trained(by_function: bool) -> Any:
        model = Classifier()
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizers = (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) if by_function else made
        loader = loader_of(generator=torch.Generator().manual_seed(1))
        trainer = Trainer(
            model=model,
            optimizers=optimizers,
            train_dataloader=loader,
            max_duration="3ep",
            algorithms=Whitening(),
            device="cpu",
            progress_bar=False,
        )
        trainer.fit()
        return model.state_dict()

    deep_compare(dict(trained(True)), dict(trained(False)))
