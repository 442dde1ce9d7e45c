"""Save and load runs and weights, with or without a Trainer."""

from composer.checkpoint.download import download_monolithic_checkpoint
from composer.checkpoint.export import export_safetensors, load_safetensors
from composer.checkpoint.file import check_file, safe_torch_load
from composer.checkpoint.lease import FolderInUseError
from composer.checkpoint.names import PartialFilePath, get_save_filename
from composer.checkpoint.run import download_checkpoint, load_checkpoint, read_checkpoint, save_checkpoint
from composer.checkpoint.safe_load import CorruptCheckpointError, UnsafeCheckpointError
from composer.checkpoint.selection import IgnoreKeys, glob_filter
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
