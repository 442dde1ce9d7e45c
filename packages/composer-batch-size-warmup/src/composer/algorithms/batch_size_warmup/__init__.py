"""BatchSizeWarmup: train with small batches first, which grow to the batch size of the loader."""

from composer.algorithms.batch_size_warmup.batch_size_warmup import BatchSizeWarmup as BatchSizeWarmup
from composer.algorithms.batch_size_warmup.batch_size_warmup import WarmupBatchSampler as WarmupBatchSampler
from composer.algorithms.batch_size_warmup.batch_size_warmup import compute_batch_size as compute_batch_size
from composer.algorithms.batch_size_warmup.batch_size_warmup import estimate_noise_scale as estimate_noise_scale

__all__ = ["BatchSizeWarmup", "WarmupBatchSampler", "compute_batch_size", "estimate_noise_scale"]
