"""`ProgressiveResizing` at its event, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.core import PRUNES_BATCH, Algorithm, Engine, Event, Placement, State, Time
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleModel

KEYS = ("progressive_resizing/height", "progressive_resizing/width", "progressive_resizing/scale_factor")


class Records(LoggerDestination):
    """Logger that stores the last metrics."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.metrics = metrics


def resize_at(elapsed: float, algorithm: ProgressiveResizing, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The batch, and what was logged, when `elapsed` of the run is over."""
    state = State(model=SimpleModel(), max_duration="1000ba", dataloader=[0], algorithms=algorithm, callbacks=Records())
    state.timestamp = state.timestamp.copy(batch=round(1000 * elapsed))
    engine = Engine(state)
    state.batch = batch
    engine.run_event("after_dataloader")
    return state.batch, state.callbacks[0].metrics  # type: ignore[attr-defined]


def width_at(elapsed: float, algorithm: ProgressiveResizing, width: int = 32) -> int:
    batch, _ = resize_at(elapsed, algorithm, (torch.zeros(2, 3, width, width), torch.zeros(2)))
    return int(batch[0].shape[3])


@pytest.mark.parametrize(
    ("elapsed", "scale"), [(0, 0.5), (0.499, 0.5), (0.5, 0.5), (0.6, 2 / 3), (0.7, 5 / 6), (0.8, 1.0), (1.0, 1.0)]
)
def test_the_scale_follows_the_formula(elapsed: float, scale: float) -> None:
    batch, metrics = resize_at(elapsed, ProgressiveResizing(size_increment=1), (torch.zeros(2, 3, 48, 96), None))

    assert (2, 3, round(48 * scale), round(96 * scale)) == batch[0].shape
    assert pytest.approx(dict(zip(KEYS, (round(48 * scale), round(96 * scale), scale), strict=True))) == metrics


def test_the_logged_values_are_plain_numbers() -> None:
    _, metrics = resize_at(0.6, ProgressiveResizing(), (torch.zeros(2, 3, 32, 32), None))

    assert [int, int, float] == [type(metrics[key]) for key in KEYS]


def test_widths_are_whole_increments_and_never_shrink() -> None:
    algorithm = ProgressiveResizing(size_increment=4)
    widths = [width_at(i / 100, algorithm, width=64) for i in range(101)]

    assert [32, *range(36, 65, 4)] == sorted(set(widths))
    assert sorted(widths) == widths


@pytest.mark.parametrize("width", [3, 30, 33, 224])
def test_images_of_any_width_end_at_full_size(width: int) -> None:
    x = torch.zeros(2, 3, width, width)
    batch, _ = resize_at(0.8, ProgressiveResizing(size_increment=4), (x, None))

    assert batch[0] is x


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_images_never_vanish(mode: str) -> None:
    algorithm = ProgressiveResizing(mode, initial_scale=0.0, size_increment=4)

    assert [4, 3] == [width_at(0, algorithm, width) for width in (32, 3)]


def test_the_width_is_exact_although_its_quotient_is_rounded() -> None:
    algorithm = ProgressiveResizing(size_increment=1)
    short = [(w, n) for n in range(1, 400) for w in range(1, n) if int(w / n * n) != w]
    widths = [int(algorithm._round_scale(w / n, torch.zeros(1, 1, 1, n)) * n) for w, n in short]

    assert (1, 49) in short
    assert [w for w, _ in short] == widths


@pytest.mark.parametrize(("delay", "finetune"), [(0.5, 0.5), (0.3, 0.7), (0.7, 0.3), (1.0, 0.0)])
def test_with_no_time_to_grow_the_size_jumps(delay: float, finetune: float) -> None:
    algorithm = ProgressiveResizing(delay_fraction=delay, finetune_fraction=finetune)

    assert [16, 32, 32] == [width_at(elapsed, algorithm) for elapsed in (delay - 0.001, min(delay + 0.001, 1), 1)]


def test_a_run_of_finetuning_has_full_images_from_the_start() -> None:
    assert 32 == width_at(0, ProgressiveResizing(delay_fraction=0, finetune_fraction=1))


@pytest.mark.parametrize("mode", ["resize", "crop"])
@pytest.mark.parametrize("shape", [(2, 32, 32), (2, 5, 32, 32)])
def test_masks_are_resized_on_request_and_refused_otherwise(mode: str, shape: tuple[int, ...]) -> None:
    x, y = torch.zeros(2, 3, 32, 32), torch.zeros(shape)
    batch, _ = resize_at(0, ProgressiveResizing(mode, resize_targets=True), (x, y))

    assert ((2, 3, 16, 16), (*shape[:-2], 16, 16)) == (batch[0].shape, batch[1].shape)
    for given in ((x, y), {"image": x, "mask": y}, (x, [{"boxes": torch.zeros(3, 4)}] * 2)):
        algorithm = ProgressiveResizing(mode, input_key="image" if isinstance(given, dict) else 0)
        with pytest.raises(
            ValueError, match=r"`resize_targets` must be True for a batch with targets that have a value"
        ):
            resize_at(0, algorithm, given)


def test_keys_select_the_images() -> None:
    batch = {"image": torch.zeros(2, 3, 8, 8), "mask": torch.zeros(2, 8, 8, dtype=torch.uint8), "id": [1, 2]}
    algorithm = ProgressiveResizing(resize_targets=True, input_key="image", target_key="mask")
    smaller, _ = resize_at(0, algorithm, batch)

    assert ((2, 3, 4, 4), (2, 4, 4), [1, 2]) == (smaller["image"].shape, smaller["mask"].shape, smaller["id"])


def test_targets_that_stay_need_not_exist() -> None:
    assert (2, 3, 4, 4) == resize_at(0, ProgressiveResizing(), [torch.zeros(2, 3, 8, 8)])[0][0].shape


def test_microbatches_are_cropped_at_one_position() -> None:
    """The whole batch is cropped, before it is split."""
    x = torch.arange(64.0).view(1, 1, 8, 8).repeat(4, 1, 1, 1)
    batch, _ = resize_at(0, ProgressiveResizing("crop"), (x, None))

    assert torch.equal(batch[0][:1].expand_as(batch[0]), batch[0])


class Prunes(Algorithm):
    """A method that judges examples by clean images."""

    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={PRUNES_BATCH}, before={"transforms_batch"})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = state.batch[0].shape


@pytest.mark.parametrize("reverse", [False, True])
def test_methods_that_prune_the_batch_see_full_images_whatever_the_order_of_the_list(reverse: bool) -> None:
    prunes = Prunes()
    algorithms: list[Algorithm] = [prunes, ProgressiveResizing()]
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=[0])
    engine = Engine(state, algorithms=algorithms[::-1] if reverse else algorithms)
    state.batch = (torch.zeros(2, 3, 8, 8), None)
    engine.run_event("after_dataloader")

    assert (2, 3, 8, 8) == prunes.seen
    assert (2, 3, 4, 4) == state.batch[0].shape


def test_the_elapsed_fraction_is_known_for_every_unit_of_time() -> None:
    state = State(model=SimpleModel(), max_duration="10ep", dataloader=[0], algorithms=ProgressiveResizing())
    state.timestamp = state.timestamp.copy(epoch=Time.from_epoch(9))
    engine = Engine(state)
    state.batch = (torch.zeros(2, 3, 8, 8), None)
    engine.run_event("after_dataloader")

    assert (2, 3, 8, 8) == state.batch[0].shape


def test_an_unknown_mode_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`mode` must be 'crop' or 'resize', got 'shrink'"):
        ProgressiveResizing("shrink")


@pytest.mark.parametrize("name", ["initial_scale", "finetune_fraction", "delay_fraction"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_a_fraction_outside_its_range_is_refused_at_construction(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` must be in \[0, 1\], got {value}"):
        ProgressiveResizing(**{name: value})  # type: ignore[arg-type]


def test_fractions_of_more_than_the_run_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"must not add up to more than 1, got 0.6 and 0.5"):
        ProgressiveResizing(delay_fraction=0.6, finetune_fraction=0.5)


def test_an_increment_of_no_pixel_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`size_increment` must be at least 1, got 0"):
        ProgressiveResizing(size_increment=0)


def test_inputs_that_are_not_images_are_refused_even_at_full_scale() -> None:
    for elapsed in (0.0, 1.0):
        with pytest.raises(TypeError, match=r"`input` must be a tensor to be resized, got list.*`input_key`"):
            resize_at(elapsed, ProgressiveResizing(), ([1, 2], None))
        with pytest.raises(ValueError, match=r"`input` must have shape \(N, C, H, W\) to be resized, got \(2, 8\)"):
            resize_at(elapsed, ProgressiveResizing(), (torch.zeros(2, 8), None))
