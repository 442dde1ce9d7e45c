"""Batch normalization over parts of the batch. Feature maps are (N, C, ...); g is the size of a ghost batch."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from composer.utils import check_integers


class _GhostBatchNorm(nn.Module):
    """Batch normalization of `ceil(N / g)` parts of the batch, whose sizes differ by at most one.

    In training each part is normalized with its own mean and variance, and updates the running statistics with the
    momentum divided by the number of parts. With running statistics, as in evaluation, parts make no difference.

    Args:
        batchnorm: The normalization that is applied to each part.
        ghost_batch_size: g, the maximum number of examples that are normalized together, at least 1.

    Attributes:
        batchnorm: The normalization.

    Raises:
        ValueError: `ghost_batch_size` is less than 1.
    """

    def __init__(self, batchnorm: _BatchNorm, ghost_batch_size: int = 32) -> None:
        super().__init__()
        check_ghost_batch_size(ghost_batch_size)
        self.ghost_batch_size = ghost_batch_size
        self.batchnorm = batchnorm
        self.batchnorm._already_ghost_batchnormed = True  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor of shape (N, C, ...)."""
        if self.batchnorm.training or self.batchnorm.running_mean is None:
            return self._normalize_parts(input)
        output: torch.Tensor = self.batchnorm(input)
        return output

    # TorchScript is used for evaluation only. It reads annotations, so this module does not postpone them.
    @torch.jit.unused  # type: ignore[untyped-decorator,unused-ignore]
    def _normalize_parts(self, input: torch.Tensor) -> torch.Tensor:
        num_parts = -(-input.shape[0] // self.ghost_batch_size)
        if num_parts <= 1:
            output: torch.Tensor = self.batchnorm(input)
            return output
        momentum = self.batchnorm.momentum
        if momentum is not None:  # None: a cumulative average over all parts
            self.batchnorm.momentum = momentum / num_parts
        try:
            # Not `tensor_split`, whose backward pass allocates a gradient of the size of the input for each part.
            sizes = [len(range(i, input.shape[0], num_parts)) for i in range(num_parts)]
            return torch.cat([self.batchnorm(part) for part in input.split_with_sizes(sizes)])
        finally:
            self.batchnorm.momentum = momentum

    def extra_repr(self) -> str:
        return f"ghost_batch_size={self.ghost_batch_size}"

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of the normalization inside: for `composer.export.plain_state_dict`.

        Raises:
            ValueError: It has no running statistics, so that evaluation normalizes parts of the batch, too.
        """
        if self.batchnorm.running_mean is None:
            raise ValueError(
                "it has no running statistics, so that it normalizes parts of the batch in evaluation, too"
            )
        return {name.removeprefix("batchnorm."): value for name, value in state.items()}

    @staticmethod
    def from_batchnorm(module: nn.Module, module_index: int = -1, ghost_batch_size: int = 32) -> "_GhostBatchNorm":
        """Wrap a batch normalization, with its parameters and statistics, in the ghost layer for its dimensions.

        Args:
            module: The layer to wrap; it is not copied.
            module_index: Its index among the wrapped layers; unused.
            ghost_batch_size: The maximum number of examples that are normalized together.

        Raises:
            TypeError: `module` is not a batch normalization.
            ValueError: `module` is another type of batch normalization, such as `SyncBatchNorm`.
        """
        if not isinstance(module, _BatchNorm):
            raise TypeError(f"`module` must be a batch normalization, got {type(module).__name__}. Do not wrap it.")
        for kind, ghost_kind in _GHOSTS.items():
            if isinstance(module, kind):
                return ghost_kind(module, ghost_batch_size)
        raise ValueError(
            f"`module` must be a `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`, got {type(module).__name__}. Do not "
            f"wrap it."
        )


class GhostBatchNorm1d(_GhostBatchNorm):
    """A `torch.nn.BatchNorm1d` over parts of the batch.

    Args:
        batchnorm: The normalization that is applied to each part.
        ghost_batch_size: The maximum number of examples that are normalized together, at least 1.

    Example:
        >>> layer = GhostBatchNorm1d(nn.BatchNorm1d(1, affine=False), ghost_batch_size=2)
        >>> layer(torch.tensor([[0.0], [2.0], [7.0], [9.0]])).round().flatten().tolist()
        [-1.0, 1.0, -1.0, 1.0]
    """


class GhostBatchNorm2d(_GhostBatchNorm):
    """A `torch.nn.BatchNorm2d` over parts of the batch; see `GhostBatchNorm1d`."""


class GhostBatchNorm3d(_GhostBatchNorm):
    """A `torch.nn.BatchNorm3d` over parts of the batch; see `GhostBatchNorm1d`."""


_GHOSTS: dict[type[_BatchNorm], type[_GhostBatchNorm]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def check_ghost_batch_size(ghost_batch_size: int) -> None:
    """Raise ValueError unless the size is an integer of at least 1."""
    check_integers("32 is the default.", ghost_batch_size=ghost_batch_size, least=1)
