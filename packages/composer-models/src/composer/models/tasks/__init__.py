"""Task wrappers: a module, its loss and its metrics in one `ComposerModel`."""

from composer.models.tasks.classification import ComposerClassifier as ComposerClassifier

__all__ = ["ComposerClassifier"]
