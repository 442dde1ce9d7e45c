"""SeqLengthWarmup: train on short sequences first and let them grow during a warmup."""

from composer.algorithms.seq_length_warmup.seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
from composer.algorithms.seq_length_warmup.seq_length_warmup import apply_curriculum as apply_curriculum
from composer.algorithms.seq_length_warmup.seq_length_warmup import apply_seq_length_warmup as apply_seq_length_warmup
from composer.algorithms.seq_length_warmup.seq_length_warmup import (
    set_batch_sequence_length as set_batch_sequence_length,
)

__all__ = ["SeqLengthWarmup", "apply_curriculum", "apply_seq_length_warmup", "set_batch_sequence_length"]
