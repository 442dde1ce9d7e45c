"""The interface of object stores, under its established import path."""

from composer.checkpoint.store_base import ObjectStore as ObjectStore
from composer.checkpoint.store_base import ObjectStoreTransientError as ObjectStoreTransientError

__all__ = ["ObjectStore", "ObjectStoreTransientError"]
