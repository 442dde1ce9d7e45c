"""Utilities for algorithms: image augmentations and conversions, dataset transforms, mixed targets and losses.

Importing it needs neither Pillow nor torchvision; functions on Pillow images need Pillow.
"""

from composer.algorithms.utils.augmentation_primitives import AugmentationFn as AugmentationFn
from composer.algorithms.utils.augmentation_primitives import as_augmentation_set as as_augmentation_set
from composer.algorithms.utils.augmentation_primitives import augmentation_sets as augmentation_sets
from composer.algorithms.utils.dataset_transforms import add_dataset_transform as add_dataset_transform
from composer.algorithms.utils.dataset_transforms import add_training_transform as add_training_transform
from composer.algorithms.utils.dataset_transforms import check_targets_stay as check_targets_stay
from composer.algorithms.utils.dataset_transforms import check_training_transform as check_training_transform
from composer.algorithms.utils.dataset_transforms import has_dataset_transform as has_dataset_transform

__all__ = [
    "AugmentationFn",
    "add_dataset_transform",
    "add_training_transform",
    "as_augmentation_set",
    "augmentation_sets",
    "check_targets_stay",
    "check_training_transform",
    "has_dataset_transform",
]
