"""Utilities for algorithms, callbacks and training loops, imported on first use.

Checkpoints, compression, inference export, sharding configurations and object stores come from other distributions,
which register them for this package: these names work if the distribution is installed.
"""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

_OWN = {
    "batch_helpers": "batch_get batch_set check_pair",
    "device": "get_device",
    "dist": "",
    "file_helpers": (
        "ensure_folder_has_no_conflicting_files format_name_with_dist format_name_with_dist_and_time is_uri parse_uri "
    ),
    "import_helpers": "MissingConditionalImportError import_object",
    "interval_scheduler": "create_interval_scheduler",
    "iter_helpers": "ensure_tuple",
    "misc": (
        "STR_TO_DTYPE add_vision_dataset_transform get_free_tcp_port is_model_ddp is_model_fsdp "
        "is_model_fsdp2 is_notebook local_part model_eval_mode needs_closure partial_format renamed_arguments "
        "unwrapped_model"
    ),
    "module_surgery": "",
    "numbers": "check_finite check_flags check_integers int_at_least plain_int plain_number",
    "reproducibility": "",
    "string_enum": "StringEnum",
    "warnings": "VersionedDeprecationWarning",
}
__getattr__, __dir__ = lazy_namespace("composer.utils", globals(), _OWN)
