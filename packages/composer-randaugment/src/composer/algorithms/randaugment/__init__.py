"""RandAugment: apply a few random augmentations of one strength to each image."""

from composer.algorithms.randaugment.randaugment import RandAugment as RandAugment
from composer.algorithms.randaugment.randaugment import RandAugmentTransform as RandAugmentTransform
from composer.algorithms.randaugment.randaugment import randaugment_image as randaugment_image

__all__ = ["RandAugment", "RandAugmentTransform", "randaugment_image"]
