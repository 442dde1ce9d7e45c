"""Types used in public signatures."""

from __future__ import annotations

from typing import Any, TypeAlias, Union

import torch.utils.data

from composer.utils.string_enum import StringEnum

Batch: TypeAlias = Any
"""A batch from a dataloader: a tensor, or any nesting of tuples, lists and mappings."""

Dataset: TypeAlias = torch.utils.data.Dataset[Batch]
"""A torch dataset of batches or samples."""

JSON: TypeAlias = Union[str, float, int, list["JSON"], dict[str, "JSON"], None]  # noqa: UP007 - 3.10 has no `|` of strings
"""A value that `json.loads` returns."""


class TrainerMode(StringEnum):
    """The current activity of the Trainer."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"


class MemoryFormat(StringEnum):
    """The memory formats of `torch.memory_format`."""

    CONTIGUOUS_FORMAT = "contiguous_format"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    PRESERVE_FORMAT = "preserve_format"
