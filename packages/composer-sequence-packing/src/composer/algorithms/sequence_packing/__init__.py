"""SequencePacking: train on rows of several documents, which do not attend to each other."""

from composer.algorithms.sequence_packing.sequence_packing import SequencePacking as SequencePacking
from composer.algorithms.sequence_packing.sequence_packing import count_tokens as count_tokens
from composer.algorithms.sequence_packing.sequence_packing import make_block_mask as make_block_mask
from composer.algorithms.sequence_packing.sequence_packing import make_document_mask as make_document_mask
from composer.algorithms.sequence_packing.sequence_packing import pack_sequences as pack_sequences

__all__ = ["SequencePacking", "count_tokens", "make_block_mask", "make_document_mask", "pack_sequences"]
