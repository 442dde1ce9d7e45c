from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from composer import Trainer, datasets
from composer.models import ComposerModel


def test_streaming_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streaming", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install composer-datasets\[streaming\]"):
        datasets.build_streaming_dataloader("s3://bucket/folder", "/tmp/nowhere", 4)


pytestmark = pytest.mark.filterwarnings("ignore")  # of mosaicml-streaming and what it imports


@pytest.fixture
def streaming() -> Any:
    return pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")


@pytest.fixture
def tokens(streaming: Any, tmp_path: Path) -> str:
    with streaming.MDSWriter(out=str(tmp_path), columns={"tokens": "ndarray:int32"}) as writer:
        for number in range(24):
            writer.write({"tokens": np.arange(number, number + 10, dtype=np.int32)})
    return str(tmp_path)


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[list[int]] = []

    def forward(self, batch: Any) -> Any:
        self.seen.append(batch["input_ids"][:, 0].tolist())
        return self.weight

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return outputs


def train(tokens: str, **arguments: Any) -> list[list[int]]:
    model = Model()
    spec = datasets.build_streaming_text_dataloader(None, tokens, 4, max_seq_len=8, seed=3)
    trainer = Trainer(
        model=model,
        train_dataloader=spec,
        max_duration="2ep",
        device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        progress_bar=False,
        **arguments,
    )
    trainer.fit()
    trainer.close()
    return model.seen


def test_a_run_over_streamed_data_resumes_where_it_was(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    whole = train(tokens, save_folder=str(folder), save_interval="1ba", run_name="whole")
    rest = train(tokens, load_path=str(next(folder.glob("ep*-ba8-rank0.pt"))))

    assert list(range(24)) == sorted(number for batch in whole[:6] for number in batch)
    assert whole[8:] == rest


def test_stored_sequences_are_cut_and_must_be_long_enough(tokens: str) -> None:
    spec = datasets.build_streaming_text_dataloader(None, tokens, 4, max_seq_len=8, is_train=False)
    assert (4, 8) == next(iter(spec.dataloader))["input_ids"].shape
    spec = datasets.build_streaming_text_dataloader(None, tokens, 4, max_seq_len=11)
    with pytest.raises(ValueError, match="at least `max_seq_len` tokens, 11, got 10"):
        next(iter(spec.dataloader))


def test_streamed_photographs_are_cropped_and_normalised(streaming: Any, tmp_path: Path) -> None:
    with streaming.MDSWriter(out=str(tmp_path / "val"), columns={"x": "pil", "y": "int"}) as writer:
        for number in range(4):
            writer.write({"x": Image.new("L", (12, 10), number), "y": number})
    spec = datasets.build_streaming_imagenet_dataloader(None, str(tmp_path), 2, is_train=False, crop_size=8)
    images, labels = spec.batch_transforms(next(iter(spec.dataloader)))

    assert ((2, 3, 8, 8), torch.float32) == (images.shape, images.dtype)
    assert [0, 1] == labels.tolist()
