"""Low-rank factors of matrices and convolutions, fitted to inputs. This module is independent of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class LowRankSolution:
    """Two factors that replace a matrix or a convolution.

    Args:
        Wa: The first factor, or the only one.
        Wb: The second factor; None if there is only one.
        bias: Added to the product; None without a bias.
        rank: Columns of the first factor; -1 if the rank was not reduced.
        nmse: The mean squared error divided by the variance of the targets.
    """

    Wa: torch.Tensor | None = None
    Wb: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    rank: int = -1
    nmse: float = 0


@torch.no_grad()
def factorize_matrix(
    X: torch.Tensor,
    Y: torch.Tensor,
    Wa: torch.Tensor,
    Wb: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    rank: int | float = 0.25,
    n_iters: int = 3,
) -> LowRankSolution:
    """Find factors of a given rank whose product maps inputs to outputs: minimize ||Y - (X Wa Wb + bias)||.

    The truncated singular value decomposition of Wa Wb is the starting point. Then Wb and Wa are solved for exactly, in
    turn, `n_iters` times. The bias, if there is one, is always the optimal one.

    Args:
        X: Inputs, shape (N, D), floating; not modified.
        Y: Outputs, shape (N, M).
        Wa: Shape (D, M), or (D, K) with a `Wb`.
        Wb: Shape (K, M).
        bias: Shape (M,). Its values are not used: the optimal bias is computed. None: no bias.
        rank: A number of at least 1; below 1, a fraction of D, rounded to at least 1 and at most the columns of Wa.
        n_iters: The number of times both factors are solved for.

    Returns:
        Wa of shape (D, rank) and Wb of shape (rank, M), in the dtype of `Wa`, computed in float64 if the device
        supports it. If the rank is at least D or M: one factor, of shape (D, M). Otherwise, if the rank is at least the
        number of columns of `Wa`: the given factors. In both cases the `rank` of the solution is -1.

    Raises:
        RuntimeError: The shapes do not match.
        ValueError: `rank` is not positive.

    Example:
        >>> X, W = torch.randn(64, 8), torch.ones(8, 6)
        >>> solution = factorize_matrix(X, X @ W, W, rank=1)
        >>> solution.Wa.shape, solution.Wb.shape, solution.nmse < 1e-6
        (torch.Size([8, 1]), torch.Size([1, 6]), True)

    Source: Zhang, Zou, He, Sun, "Accelerating Very Deep Convolutional Networks for Classification and Detection",
        arXiv:1505.06798, section 3.1, the linear case.
    Differs: the paper takes the principal components of the outputs; here the factors are solved for in turn.
    """
    if X.dim() != 2 or Y.dim() != 2 or len(X) != len(Y):
        raise RuntimeError(
            f"`X` and `Y` must be matrices with the same number of rows, got {_shapes(X, Y)}. Flatten them."
        )
    D, M = X.shape[1], Y.shape[1]
    columns = Wa.shape[1]
    rank = clean_rank(rank, D, columns)
    whole = wide(Wa) if Wb is None else wide(Wa) @ wide(Wb)
    if whole.shape != (D, M):
        given = _shapes(Wa) if Wb is None else _shapes(Wa, Wb)
        raise RuntimeError(f"`Wa` and `Wb` must multiply to {D} by {M}, got {given}. Their rows are inputs.")
    inputs, outputs = _centred(wide(X), bias), _centred(wide(Y), bias)
    factors: tuple[torch.Tensor, ...]
    if rank >= D or rank >= M:
        factors, rank = (_lstsq(inputs, outputs),), -1
    elif rank >= columns:
        factors = (wide(Wa),) if Wb is None else (wide(Wa), wide(Wb))
        error = wide(Y) - _product(wide(X), factors) - (0 if bias is None else wide(bias))
        return LowRankSolution(Wa, Wb, bias, -1, _nmse(error, wide(Y)))
    else:
        factors = _alternate(inputs, outputs, _cut(whole, rank), n_iters)
    best = None if bias is None else wide(Y).mean(0) - _product(wide(X).mean(0), factors)
    first, second = (factor.to(Wa.dtype) for factor in (*factors, *factors)[:2])
    return LowRankSolution(
        Wa=first,
        Wb=None if len(factors) == 1 else second,
        bias=None if best is None else best.to(Wa.dtype),
        rank=rank,
        nmse=_nmse(outputs - _product(inputs, factors), wide(Y)),
    )


@torch.no_grad()
def factorize_conv2d(
    X: torch.Tensor,
    Wa: torch.Tensor,
    Wb: torch.Tensor | None = None,
    rank: int | float = 0.25,
    biasA: torch.Tensor | None = None,
    biasB: torch.Tensor | None = None,
    n_iters: int = 3,
    **conv2d_kwargs: Any,
) -> LowRankSolution:
    """Find a convolution with few channels and a 1 by 1 convolution that together approximate a convolution on inputs.

    This is `factorize_matrix` on a matrix whose rows are the windows of the images.

    Args:
        X: Images, shape (N, C, H, W), floating; not modified.
        Wa: Filters, shape (out, C, h, w), or (K, C, h, w) with a `Wb`.
        Wb: Filters of 1 by 1, shape (out, K, 1, 1).
        rank: Channels between both; below 1, a fraction of C * h * w; see `factorize_matrix`.
        biasA: The bias of the filters `Wa`.
        biasB: The bias of the filters `Wb`.
        n_iters: See `factorize_matrix`.
        **conv2d_kwargs: `stride`, `padding` and `dilation` of the filters `Wa`, numbers or pairs.

    Returns:
        Wa of shape (rank, C, h, w), Wb of shape (out, rank, 1, 1), and the bias of Wb. Wb is None if the rank
        is too large; see `factorize_matrix`.

    Raises:
        RuntimeError: `biasB` is given without `Wb`.
        NotImplementedError: `groups` is not 1.

    Example:
        >>> solution = factorize_conv2d(torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), rank=2, padding=1)
        >>> solution.Wa.shape, solution.Wb.shape
        (torch.Size([2, 4, 3, 3]), torch.Size([8, 2, 1, 1]))

    Source: Zhang et al., arXiv:1505.06798, section 3.1.
    Differs: see `factorize_matrix`.
    """
    if biasB is not None and Wb is None:
        raise RuntimeError("`biasB` is the bias of `Wb` and must not be given without it. Pass it as `biasA`.")
    if conv2d_kwargs.pop("groups", 1) != 1:
        raise NotImplementedError(
            "`groups` must be 1, because the filters of different groups have different input channels."
        )
    whole_bias = biasA
    outputs = F.conv2d(wide(X), wide(Wa), None if biasA is None else wide(biasA), **conv2d_kwargs)
    if Wb is not None:
        outputs = F.conv2d(outputs, wide(Wb), None if biasB is None else wide(biasB))
        whole_bias = None if biasA is None and biasB is None else _bias_of_both(biasA, Wb, biasB)
    # (N, C * h * w, windows) -> (N * windows, C * h * w), and (N, out, H', W') -> (N * windows, out)
    rows = F.unfold(X, Wa.shape[2:], **conv2d_kwargs).transpose(1, 2).flatten(0, 1)
    targets = outputs.flatten(2).transpose(1, 2).flatten(0, 1)
    first, second = Wa.flatten(1).T, None if Wb is None else Wb.flatten(1).T
    solution = factorize_matrix(rows, targets, first, second, whole_bias, rank, n_iters)
    assert solution.Wa is not None
    solution.Wa = solution.Wa.T.reshape(-1, *Wa.shape[1:])
    if solution.Wb is not None:
        solution.Wb = solution.Wb.T.reshape(*solution.Wb.T.shape, 1, 1)
    return solution


def clean_rank(rank: int | float, fraction_of: int, largest: int | None = None) -> int:
    """Convert a rank, given as a number or, below 1, as a fraction, to a number of at least 1.

    Raises:
        ValueError: The rank is not positive.
    """
    if rank <= 0:
        raise ValueError(f"The rank must be positive, got {rank!r}. A value below 1 is a fraction of the smaller size.")
    if rank >= 1:
        return int(rank)
    number = max(int(rank * fraction_of), 1)
    return number if largest is None else min(number, largest)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to the precision in which the factors are computed."""
    return x.float() if x.device.type == "mps" else x.double()  # no float64 on Apple devices


def _alternate(
    X: torch.Tensor, Y: torch.Tensor, start: tuple[torch.Tensor, torch.Tensor], n_iters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    Wa, Wb = start
    best = _lstsq(X, Y) if n_iters else Y  # the full-rank solution, approximated by Wa Wb
    for _ in range(n_iters):
        Wb = _lstsq(X @ Wa, Y)
        Wa = _lstsq(Wb.T, best.T).T
    return Wa, Wb


def _cut(W: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest product of a given rank, with the singular values split evenly between both factors."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    root = S[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * Vh[:rank]


def _lstsq(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Return the smallest W that minimizes ||A W - B||, also for linearly dependent columns of A."""
    if A.device.type == "cpu":
        solution: torch.Tensor = torch.linalg.lstsq(A, B, driver="gelsd").solution
    else:
        solution = torch.linalg.pinv(A) @ B  # on other devices `lstsq` requires independent columns
    return solution


def _centred(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Subtract the mean if there is a bias: for any factors, the optimal bias compensates for it."""
    return x if bias is None else x - x.mean(0)


def _product(x: torch.Tensor, factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    for factor in factors:
        x = x @ factor
    return x


def _nmse(error: torch.Tensor, Y: torch.Tensor) -> float:
    variance = Y.var(correction=min(1, Y.numel() - 1))
    return float(error.square().mean() / variance.clamp_min(torch.finfo(Y.dtype).tiny))


def _bias_of_both(biasA: torch.Tensor | None, Wb: torch.Tensor, biasB: torch.Tensor | None) -> torch.Tensor:
    total = torch.zeros_like(Wb[:, 0, 0, 0]) if biasB is None else biasB
    return total if biasA is None else total + Wb[:, :, 0, 0] @ biasA


def _shapes(*tensors: torch.Tensor) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
