"""The names of checkpoints."""

from __future__ import annotations

import torch

from composer.checkpoint.names import PartialFilePath
from composer.core import State, Timestamp


def test_a_path_is_filled_in_with_or_without_a_folder() -> None:
    state = State(torch.nn.Linear(1, 1), run_name="r")
    state.timestamp = Timestamp(epoch=1, batch=20)

    assert PartialFilePath("ep{epoch}-ba{batch}.pt").format(state) == "ep1-ba20.pt"
    assert PartialFilePath("ep{epoch}-ba{batch}.pt", "{run_name}/saved").format(state) == "r/saved/ep1-ba20.pt"


def test_only_the_folder_is_filled_in_to_keep_placeholders() -> None:
    state = State(torch.nn.Linear(1, 1), run_name="r")
    path = PartialFilePath("{run_name}-ep{epoch}.pt", "{run_name}/saved")

    assert path.format(state, keep_placeholders=True) == "r/saved/{run_name}-ep{epoch}.pt"
