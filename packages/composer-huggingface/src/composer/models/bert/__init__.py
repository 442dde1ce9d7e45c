"""BERT: masked language modeling, and classification of sequences."""

from composer.models.bert.model import create_bert_classification as create_bert_classification
from composer.models.bert.model import create_bert_mlm as create_bert_mlm

__all__ = ["create_bert_classification", "create_bert_mlm"]
