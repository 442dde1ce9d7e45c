"""Enumerations that MosaicML's Composer has; nothing here needs them."""

from __future__ import annotations

from composer.utils.string_enum import StringEnum


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
