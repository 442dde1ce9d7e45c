"""Utilities for algorithms, callbacks and training loops.

Checkpoints, compression, inference export, sharding configurations and object stores come from other distributions,
which register them for this package: these names work if the distribution is installed.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

from composer.utils import auto_log_hparams as auto_log_hparams
from composer.utils import batch_helpers as batch_helpers
from composer.utils import device as device
from composer.utils import dist as dist
from composer.utils import file_helpers as file_helpers
from composer.utils import import_helpers as import_helpers
from composer.utils import iter_helpers as iter_helpers
from composer.utils import misc as misc
from composer.utils import module_surgery as module_surgery
from composer.utils import reproducibility as reproducibility
from composer.utils import retrying as retrying
from composer.utils import string_enum as string_enum
from composer.utils import warnings as warnings
from composer.utils._registered import find_registered
from composer.utils.auto_log_hparams import convert_flat_dict_to_nested_dict as convert_flat_dict_to_nested_dict
from composer.utils.auto_log_hparams import convert_nested_dict_to_flat_dict as convert_nested_dict_to_flat_dict
from composer.utils.auto_log_hparams import extract_hparams as extract_hparams
from composer.utils.batch_helpers import batch_get as batch_get
from composer.utils.batch_helpers import batch_set as batch_set
from composer.utils.batch_helpers import check_pair as check_pair
from composer.utils.device import get_device as get_device
from composer.utils.device import is_hpu_installed as is_hpu_installed
from composer.utils.device import is_xla_installed as is_xla_installed
from composer.utils.file_helpers import FORMAT_NAME_WITH_DIST_AND_TIME_TABLE as FORMAT_NAME_WITH_DIST_AND_TIME_TABLE
from composer.utils.file_helpers import FORMAT_NAME_WITH_DIST_TABLE as FORMAT_NAME_WITH_DIST_TABLE
from composer.utils.file_helpers import ensure_folder_has_no_conflicting_files as ensure_folder_has_no_conflicting_files
from composer.utils.file_helpers import ensure_folder_is_empty as ensure_folder_is_empty
from composer.utils.file_helpers import format_name_with_dist as format_name_with_dist
from composer.utils.file_helpers import format_name_with_dist_and_time as format_name_with_dist_and_time
from composer.utils.file_helpers import is_uri as is_uri
from composer.utils.file_helpers import parse_uri as parse_uri
from composer.utils.import_helpers import MissingConditionalImportError as MissingConditionalImportError
from composer.utils.import_helpers import import_object as import_object
from composer.utils.iter_helpers import ensure_tuple as ensure_tuple
from composer.utils.misc import STR_TO_DTYPE as STR_TO_DTYPE
from composer.utils.misc import ParallelismType as ParallelismType
from composer.utils.misc import add_vision_dataset_transform as add_vision_dataset_transform
from composer.utils.misc import check_finite as check_finite
from composer.utils.misc import check_flags as check_flags
from composer.utils.misc import check_integers as check_integers
from composer.utils.misc import create_interval_scheduler as create_interval_scheduler
from composer.utils.misc import get_free_tcp_port as get_free_tcp_port
from composer.utils.misc import int_at_least as int_at_least
from composer.utils.misc import is_model_ddp as is_model_ddp
from composer.utils.misc import is_model_fsdp as is_model_fsdp
from composer.utils.misc import is_model_fsdp2 as is_model_fsdp2
from composer.utils.misc import is_notebook as is_notebook
from composer.utils.misc import local_part as local_part
from composer.utils.misc import model_eval_mode as model_eval_mode
from composer.utils.misc import needs_closure as needs_closure
from composer.utils.misc import partial_format as partial_format
from composer.utils.misc import plain_int as plain_int
from composer.utils.misc import plain_number as plain_number
from composer.utils.misc import renamed_arguments as renamed_arguments
from composer.utils.misc import unwrapped_model as unwrapped_model
from composer.utils.misc import warning_on_one_line as warning_on_one_line
from composer.utils.retrying import retry as retry
from composer.utils.string_enum import StringEnum as StringEnum
from composer.utils.warnings import VersionedDeprecationWarning as VersionedDeprecationWarning

if TYPE_CHECKING:
    from composer.utils import collect_env as collect_env
    from composer.utils.collect_env import configure_excepthook as configure_excepthook
    from composer.utils.collect_env import disable_env_report as disable_env_report
    from composer.utils.collect_env import enable_env_report as enable_env_report
    from composer.utils.collect_env import get_composer_env_dict as get_composer_env_dict
    from composer.utils.collect_env import print_env as print_env

__all__ = [
    "FORMAT_NAME_WITH_DIST_AND_TIME_TABLE",
    "FORMAT_NAME_WITH_DIST_TABLE",
    "STR_TO_DTYPE",
    "MissingConditionalImportError",
    "ParallelismType",
    "StringEnum",
    "VersionedDeprecationWarning",
    "add_vision_dataset_transform",
    "batch_get",
    "batch_set",
    "check_finite",
    "check_flags",
    "check_integers",
    "check_pair",
    "configure_excepthook",
    "convert_flat_dict_to_nested_dict",
    "convert_nested_dict_to_flat_dict",
    "create_interval_scheduler",
    "disable_env_report",
    "enable_env_report",
    "ensure_folder_has_no_conflicting_files",
    "ensure_folder_is_empty",
    "ensure_tuple",
    "extract_hparams",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_composer_env_dict",
    "get_device",
    "get_free_tcp_port",
    "import_object",
    "int_at_least",
    "is_hpu_installed",
    "is_model_ddp",
    "is_model_fsdp",
    "is_model_fsdp2",
    "is_notebook",
    "is_uri",
    "is_xla_installed",
    "local_part",
    "model_eval_mode",
    "needs_closure",
    "parse_uri",
    "partial_format",
    "plain_int",
    "plain_number",
    "print_env",
    "renamed_arguments",
    "retry",
    "unwrapped_model",
    "warning_on_one_line",
]


# Imported on first use: `python -m composer.utils.collect_env` would warn about a module that is already imported.
_COLLECT_ENV = (
    "configure_excepthook",
    "disable_env_report",
    "enable_env_report",
    "get_composer_env_dict",
    "print_env",
)


def __getattr__(name: str) -> Any:
    if name in ("collect_env", *_COLLECT_ENV):
        module = import_module("composer.utils.collect_env")
        return module if name == "collect_env" else getattr(module, name)
    value = find_registered(__name__, name)
    globals()[name] = value
    return value
