"""TestTimeAugmentation: evaluate with the mean of the logits of several views of each image."""

from composer.algorithms.test_time_augmentation.test_time_augmentation import (
    TestTimeAugmentation as TestTimeAugmentation,
)
from composer.algorithms.test_time_augmentation.test_time_augmentation import average_views as average_views

__all__ = ["TestTimeAugmentation", "average_views"]
