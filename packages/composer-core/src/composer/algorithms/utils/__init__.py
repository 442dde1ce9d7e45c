"""Utilities for algorithms: image augmentations and conversions, dataset transforms, mixed targets and losses.

Names are imported on first use. None needs torchvision; functions on Pillow images need Pillow.
"""

from composer.core._registry import lazy_namespace

_OWN = {
    "augmentation_primitives": "AugmentationFn as_augmentation_set augmentation_sets",
    "dataset_transforms": (
        "add_dataset_transform add_training_transform check_targets_stay check_training_transform has_dataset_transform"
    ),
}
__getattr__, __dir__ = lazy_namespace("composer.algorithms.utils", globals(), _OWN)
