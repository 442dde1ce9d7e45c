"""Metrics for classification, segmentation, language modeling and detection, on top of torchmetrics."""

from composer.metrics.map import MAP as MAP
from composer.metrics.metrics import CrossEntropy as CrossEntropy
from composer.metrics.metrics import Dice as Dice
from composer.metrics.metrics import LossMetric as LossMetric
from composer.metrics.metrics import MIoU as MIoU
from composer.metrics.nlp import BinaryF1Score as BinaryF1Score
from composer.metrics.nlp import LanguageCrossEntropy as LanguageCrossEntropy
from composer.metrics.nlp import LanguagePerplexity as LanguagePerplexity
from composer.metrics.nlp import MaskedAccuracy as MaskedAccuracy

__all__ = [
    "MAP",
    "BinaryF1Score",
    "CrossEntropy",
    "Dice",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "LossMetric",
    "MIoU",
    "MaskedAccuracy",
]
