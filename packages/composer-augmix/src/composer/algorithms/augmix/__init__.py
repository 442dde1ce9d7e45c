"""AugMix: blend each image with several chains of random augmentations of it."""

from composer.algorithms.augmix.augmix import AugmentAndMixTransform as AugmentAndMixTransform
from composer.algorithms.augmix.augmix import AugMix as AugMix
from composer.algorithms.augmix.augmix import augment_and_mix as augment_and_mix
from composer.algorithms.augmix.augmix import augmix_image as augmix_image

__all__ = ["AugMix", "AugmentAndMixTransform", "augment_and_mix", "augmix_image"]
