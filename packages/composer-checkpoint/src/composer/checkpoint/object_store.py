"""Another import path of some names of `composer.utils.object_store`, which is part of composer-compat."""

from __future__ import annotations

from typing import Any

from composer.checkpoint.storage import ObjectStoreTransientError as ObjectStoreTransientError
from composer.utils.import_helpers import import_from_distribution

_STORES = "composer.utils.object_store"
_MODULES = {
    "FsspecObjectStore": _STORES,
    "GCSObjectStore": _STORES,
    "ObjectStore": _STORES,
    "S3ObjectStore": _STORES,
    "maybe_create_object_store_from_uri": f"{_STORES}.remote_paths",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_from_distribution(_MODULES[name], name, "composer-compat", f"{__name__}.{name}")
