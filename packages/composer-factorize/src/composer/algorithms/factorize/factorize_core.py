"""Low-rank factors of matrices and convolutions, fitted to inputs. Nothing here knows of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["LowRankSolution", "factorize_conv2d", "factorize_matrix"]


@dataclass
class LowRankSolution:
    """Two factors that replace one.

    Args:
        Wa: The first factor, or the only one.
        Wb: The second factor; None if there is one only.
        bias: Added to the product; None if the problem has none.
        rank: Columns of the first factor; -1 if the product was not made smaller.
        nmse: The mean squared error over the variance of what was approximated.
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
    """Find factors of a given rank whose product maps inputs to outputs: minimise ||Y - (X Wa Wb + bias)||.

    Starts from the singular value decomposition of Wa Wb, cut to the rank, and then solves for Wb and for Wa in turn,
    `n_iters` times, each exactly. The bias, if there is one, is the best one at each point.

    Args:
        X: Inputs, shape (N, D), floating; not modified.
        Y: Outputs, shape (N, M).
        Wa: Shape (D, M), or (D, K) with a `Wb`.
        Wb: Shape (K, M).
        bias: Shape (M,). Its values do not matter: the best one is found. None: there is none.
        rank: At least 1; or below 1 as a fraction of D, which gives no less than 1 and no more than Wa has columns.
        n_iters: How often both factors are solved for.

    Returns:
        Wa of shape (D, rank) and Wb of shape (rank, M), in the dtype of `Wa`, computed in float64 where the device has
        it. If the rank is no smaller than D or M: one factor, of shape (D, M). Otherwise, if it is no smaller than the
        columns of `Wa`: what was given. In both cases the solution's `rank` is -1.

    Raises:
        RuntimeError: The shapes do not fit.
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
        raise RuntimeError(f"`X` and `Y` must be matrices of equally many rows, got {_shapes(X, Y)}. Flatten them.")
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
    """Find a convolution of few channels and a 1 by 1 convolution that together do what a convolution does to inputs.

    The windows of the images are the rows of a matrix, on which this is `factorize_matrix`.

    Args:
        X: Images, shape (N, C, H, W), floating; not modified.
        Wa: Filters, shape (out, C, h, w), or (K, C, h, w) with a `Wb`.
        Wb: Filters of 1 by 1, shape (out, K, 1, 1).
        rank: Channels between both, or below 1 a fraction of C * h * w; see `factorize_matrix`.
        biasA: Of the filters `Wa`.
        biasB: Of the filters `Wb`.
        n_iters: See `factorize_matrix`.
        **conv2d_kwargs: The `stride`, `padding` and `dilation` of the filters `Wa`, numbers or pairs.

    Returns:
        Wa of shape (rank, C, h, w), Wb of shape (out, rank, 1, 1), and the bias of the latter. Wb is None if the rank
        is too large; see `factorize_matrix`.

    Raises:
        RuntimeError: `biasB` without `Wb`.
        NotImplementedError: `groups` other than 1.

    Example:
        >>> solution = factorize_conv2d(torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), rank=2, padding=1)
        >>> solution.Wa.shape, solution.Wb.shape
        (torch.Size([2, 4, 3, 3]), torch.Size([8, 2, 1, 1]))

    Source: Zhang et al., arXiv:1505.06798, section 3.1.
    Differs: as `factorize_matrix`.
    """
    if biasB is not None and Wb is None:
        raise RuntimeError("`biasB` must not be given without `Wb`, whose bias it is. Pass it as `biasA`.")
    if conv2d_kwargs.pop("groups", 1) != 1:
        raise NotImplementedError("`groups` must be 1: filters of groups do not see the same channels.")
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
    """A rank given as a number or, below 1, as a fraction, as a number of at least 1.

    Raises:
        ValueError: It is not positive.
    """
    if rank <= 0:
        raise ValueError(f"The rank must be positive, got {rank!r}. A fraction such as 0.25 is of the smaller size.")
    if rank >= 1:
        return int(rank)
    number = max(int(rank * fraction_of), 1)
    return number if largest is None else min(number, largest)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the precision that the factors are computed in."""
    return x.float() if x.device.type == "mps" else x.double()  # Apple's devices have no float64


def _alternate(
    X: torch.Tensor, Y: torch.Tensor, start: tuple[torch.Tensor, torch.Tensor], n_iters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    Wa, Wb = start
    best = _lstsq(X, Y) if n_iters else Y  # of full rank; what the best Wa for a Wb approximates
    for _ in range(n_iters):
        Wb = _lstsq(X @ Wa, Y)
        Wa = _lstsq(Wb.T, best.T).T
    return Wa, Wb


def _cut(W: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest product of a given rank, the singular values shared evenly between both factors."""
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    root = S[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * Vh[:rank]


def _lstsq(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """The smallest W that minimises ||A W - B||, also where the columns of A depend on each other."""
    if A.device.type == "cpu":
        solution: torch.Tensor = torch.linalg.lstsq(A, B, driver="gelsd").solution
    else:
        solution = torch.linalg.pinv(A) @ B  # other devices only solve for independent columns
    return solution


def _centred(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Without its mean if there is a bias: the best bias takes that out, whatever the factors are."""
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
