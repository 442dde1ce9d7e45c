from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from composer.callbacks.image_visualizer import ImageVisualizer
from composer.core import Engine, State
from composer.loggers import LoggerDestination
from composer.testing import RandomImageDataset, RandomSegmentationDataset, SimpleConvModel, SimpleSegmentationModel


class Album(LoggerDestination):
    """Logger that stores the images."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Any = None,
        mask_class_labels: Any = None,
        use_table: bool = True,
    ) -> None:
        page = {"images": images, "name": name, "channels_last": channels_last, "step": step, "masks": masks}
        self.pages.append({**page, "use_table": use_table})

    def named(self, name: str) -> list[dict[str, Any]]:
        return [page for page in self.pages if page["name"] == name]


def train(run: Any, visualizer: ImageVisualizer, model: Any, data: Any, **kwargs: Any) -> Album:
    album = Album()
    begun = run(
        [visualizer, album],
        model=model,
        train_dataloader=DataLoader(data, batch_size=4),
        eval_dataloader=DataLoader(data, batch_size=4),
        **kwargs,
    )
    begun.fit()
    return album


def test_inputs_are_logged_at_the_interval_and_once_per_evaluation(run: Any) -> None:
    data = RandomImageDataset(size=20)
    album = train(run, ImageVisualizer("2ba", num_images=3), SimpleConvModel(), data, device_train_microbatch_size=2)
    pages = album.named("Images/Train")

    assert [page["step"] for page in pages] == [0, 2, 4, 6, 8]
    assert {tuple(page["images"].shape) for page in pages} == {(2, 3, 32, 32)}  # of a microbatch
    assert torch.equal(pages[0]["images"], data.x[:2])
    assert len(album.named("Images/Eval")) == 2
    assert torch.equal(album.named("Images/Eval")[0]["images"], data.x[:3])
    assert all(page["masks"] is None and page["use_table"] and not page["channels_last"] for page in album.pages)


def test_segmentation_comes_with_masks(run: Any) -> None:
    data = RandomSegmentationDataset(size=8, num_classes=3)
    data.y[0] = -1
    model = SimpleSegmentationModel(num_classes=3)
    model.loss = lambda outputs, batch: outputs.mean()  # type: ignore[method-assign]
    visualizer = ImageVisualizer("1ep", mode="Segmentation")
    album = train(run, visualizer, model, data, max_duration="2ep")

    assert [page["step"] for page in album.named("Images/Train")] == [0, 2]
    assert len(album.named("Images/Eval")) == 2
    masks = album.named("Images/Eval")[-1]["masks"]
    assert torch.equal(masks["ground_truth"], data.y[:4].clamp(min=0))
    with torch.no_grad():
        assert torch.equal(masks["prediction"], model((data.x[:4], None)).argmax(1))


def test_nobody_listening_costs_nothing(run: Any) -> None:
    begun = run(ImageVisualizer("1ba"), max_duration="1ba")
    begun.trainer.logger.destinations = ()
    begun.fit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "video"}, "`mode` must be 'input' or 'segmentation', got 'video'"),
        ({"mode": 1}, "`mode` must be"),
        ({"num_images": 0}, "`num_images` must be at least 1"),
        ({"interval": "1sp"}, "`interval` must be a time in batches or epochs"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageVisualizer(**arguments)


def test_what_is_no_image_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match=r"`input_key` must select images .* but 1 selects \(2,\)"):
        run(ImageVisualizer(input_key=1)).fit()
    with pytest.raises(ValueError, match="selects str"):
        run(ImageVisualizer(input_key=lambda batch: "text")).fit()


def test_outputs_that_are_no_scores_per_pixel_are_refused(run: Any) -> None:
    with pytest.raises(ValueError, match=r"`mode` must be 'input' for a model whose outputs are not scores"):
        run(ImageVisualizer(mode="segmentation")).fit()


def test_no_step_waits_for_the_images() -> None:
    """From the device "meta" nothing can be copied."""
    visualizer, album = ImageVisualizer(mode="segmentation", num_images=2), Album()
    state = State(torch.nn.Linear(1, 1), max_duration="1ba", dataloader=[0], callbacks=[visualizer, album])
    engine = Engine(state)
    state.batch = (torch.zeros(4, 3, 8, 8, device="meta"), torch.zeros(4, 8, 8, device="meta"))
    state.outputs = torch.zeros(4, 5, 8, 8, device="meta")
    engine.run_event("before_loss")

    [page] = album.pages
    assert page["images"].shape == (2, 3, 8, 8)
    assert {mask.shape for mask in page["masks"].values()} == {(2, 8, 8)}
