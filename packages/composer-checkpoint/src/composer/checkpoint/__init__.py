"""Checkpoints: saving and loading runs and weights, with or without a Trainer."""

from composer.checkpoint._container import check_file
from composer.checkpoint._filter import IgnoreKeys, glob_filter
from composer.checkpoint._lease import FolderInUseError
from composer.checkpoint._loading import download_checkpoint, load_checkpoint
from composer.checkpoint._names import PartialFilePath, get_save_filename
from composer.checkpoint._reading import read_checkpoint
from composer.checkpoint._safe_load import UnsafeCheckpointError, safe_torch_load
from composer.checkpoint._saving import save_checkpoint
from composer.checkpoint._seal import CorruptCheckpointError
from composer.checkpoint.download import download_monolithic_checkpoint
from composer.checkpoint.export import export_safetensors, load_safetensors
from composer.checkpoint.state_dict import (
    get_metadata_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    get_resumption_state_dict,
)
from composer.checkpoint.upload import upload_file

__all__ = [
    "CorruptCheckpointError",
    "FolderInUseError",
    "IgnoreKeys",
    "PartialFilePath",
    "UnsafeCheckpointError",
    "check_file",
    "download_checkpoint",
    "download_monolithic_checkpoint",
    "export_safetensors",
    "get_metadata_state_dict",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_resumption_state_dict",
    "get_save_filename",
    "glob_filter",
    "load_checkpoint",
    "load_safetensors",
    "read_checkpoint",
    "safe_torch_load",
    "save_checkpoint",
    "upload_file",
]
