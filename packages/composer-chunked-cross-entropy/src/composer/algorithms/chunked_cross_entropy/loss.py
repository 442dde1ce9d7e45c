"""`compute_chunked_cross_entropy`. Symbols: N tokens, width H, V classes, C tokens per chunk, logits x, log Z.

A linear head and the cross-entropy need the logits, shape (N, V), and their gradient, which are the largest tensors of
many language models. The loss is a sum over tokens, so the logits of one chunk of tokens are enough at any time: its
loss, and its part of each gradient, are computed together in the forward pass. The backward pass only scales them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from composer.utils import MissingConditionalImportError, check_finite, check_integers

_REDUCTIONS = ("mean", "sum", "none")
_KERNELS = (None, "torch", "liger")


def compute_chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Return `cross_entropy(linear(hidden, weight, bias), targets)` without the logits of all tokens.

    The logits of C tokens at a time are computed, used for the loss and for its gradients, and freed. By default

        C = 2^k, the smallest power of 2 that is at least N / ceil(V / H) and at least H / 4

    so that the logits of a chunk are about as large as `hidden`, or a quarter of `weight`. Chunks are computed in the
    dtype of `autocast`, or in that of `hidden`; softmax, loss and the sum of the gradients of the weight are in
    float32, or in float64 if the inputs are. With `reduction="none"`, the backward pass computes the logits of each
    chunk again.

    Call it where the weight is complete. Sharding by `fully_shard` gathers weights in the `forward` of their module:
    the algorithm `ChunkedCrossEntropy` computes the loss there, but `model.head.weight` outside of it is a shard.

    Args:
        hidden: Shape (..., H), floating: the inputs of the head. Not modified.
        weight: Shape (V, H), as in `torch.nn.Linear`. It may also be the weight of an embedding.
        targets: Shape (...): class indices in [0, V), int64, or `ignore_index`.
        bias: Shape (V,).
        ignore_index: The target of tokens that do not count.
        reduction: "mean" over the tokens that count, "sum", or "none" for one loss per token.
        label_smoothing: In [0, 1]: the part of each target that is spread evenly over all classes.
        z_loss: At least 0; adds `z_loss * (log Z)^2` to the loss of each token.
        softcap: Above 0; bounds logits x to `softcap * tanh(x / softcap)`. None: they are not bounded.
        chunk_size: Tokens per chunk C. None: see above.
        kernel: "torch" for the operators of torch; "liger" for the fused kernel of `liger_kernel`, which reads the
            number of targets from the device. None: "liger" for CUDA tensors if it is installed and supports the
            request, which excludes float64, `reduction="none"`, a `chunk_size` and compiled models.

    Returns:
        A scalar, or shape (...) with `reduction="none"`; float64 if the inputs are, else float32. If no token counts,
        it is 0, and so are its gradients.

    Raises:
        ValueError: An argument is out of range, shapes or dtypes do not match, or "liger" does not support the request.
        TypeError: `targets` are not int64, or a tensor is a `DTensor`, such as a shard of a weight.
        IndexError, RuntimeError: A target is not a class, as `torch.gather` reports it.
        MissingConditionalImportError: `kernel="liger"`, and `liger_kernel` is not installed.
        RuntimeError: In a second backward pass, even with `retain_graph=True`, or if gradients are differentiated.

    Example:
        >>> hidden, weight = torch.randn(6, 4), torch.randn(50, 4)
        >>> targets = torch.tensor([3, 1, -100, 0, 49, 7])
        >>> loss = compute_chunked_cross_entropy(hidden, weight, targets)
        >>> bool(torch.isclose(loss, F.cross_entropy(F.linear(hidden, weight), targets)))
        True

    Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989, section 3.2, for
    the chunks. Chowdhery et al., "PaLM", arXiv:2204.02311, section 5, for the z-loss. Gemma Team, "Gemma 2",
    arXiv:2408.00118, section 2, for the cap.
    Differs: gradients of the weight are summed over chunks in float32; chunks have at least H / 4 tokens; if no token
    counts, the mean is 0, not NaN.
    """
    check_arguments(ignore_index, label_smoothing, z_loss, softcap, chunk_size, kernel)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"`reduction` must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}.")
    dtype = _compute_dtype(hidden)
    _check_tensors(hidden, weight, targets, bias)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    options = (ignore_index, label_smoothing, z_loss, softcap)
    if _uses_liger(kernel, rows, dtype, reduction, chunk_size):
        losses = _sum_with_liger(rows, weight, labels, bias, dtype, *options)
    else:
        size = _default_chunk_size(rows.shape[0], rows.shape[1], weight.shape[0]) if chunk_size is None else chunk_size
        chunks = (size, dtype, reduction == "none", torch.is_grad_enabled())
        losses = _ChunkedLoss.apply(rows, weight, bias, labels, *options, *chunks)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses / (labels != ignore_index).sum().clamp(min=1) if reduction == "mean" else losses


def check_arguments(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk_size: int | None,
    kernel: str | None,
) -> None:
    """Check options of the loss, before there are tensors; see `compute_chunked_cross_entropy`.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of range.
    """
    check_integers(ignore_index=ignore_index)
    check_finite("0 smooths nothing.", label_smoothing=label_smoothing, least=0, most=1)
    check_finite("The paper uses 1e-4.", z_loss=z_loss, least=0)
    if softcap is not None:
        check_finite("Use for example 30.0.", softcap=softcap, above=0)
    if chunk_size is not None:
        check_integers("Use None for the default.", least=1, chunk_size=chunk_size)
    if kernel not in _KERNELS:
        raise ValueError(f"`kernel` must be one of {', '.join(map(repr, _KERNELS))}, got {kernel!r}. None chooses.")


def _check_tensors(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> None:
    named = {"hidden": hidden, "weight": weight, "targets": targets, **({} if bias is None else {"bias": bias})}
    for name, tensor in named.items():
        if hasattr(tensor, "to_local"):
            raise TypeError(
                f"`{name}` must be a plain tensor, got a `DTensor` of local shape {tuple(tensor.to_local().shape)}. "
                f"Compute the loss in the `forward` of the head, where `fully_shard` has gathered its weight, as the "
                f"algorithm `ChunkedCrossEntropy` does."
            )
    if targets.dtype is not torch.int64:
        raise TypeError(
            f"`targets` must be class indices of dtype torch.int64, got {targets.dtype}. Use "
            f"`torch.nn.functional.cross_entropy` for probabilities."
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`targets` must have one index per token, shape {tuple(hidden.shape[:-1])} for `hidden` of shape "
            f"{tuple(hidden.shape)}, got {tuple(targets.shape)}."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"`weight` must have shape (V, {hidden.shape[-1]}) for `hidden` of shape {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` must have shape ({weight.shape[0]},), as `weight` has rows, got {tuple(bias.shape)}.")
    dtypes = {tensor.dtype for tensor in (hidden, weight, *([] if bias is None else [bias]))}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(
            f"`hidden`, `weight` and `bias` must have one dtype, got {', '.join(sorted(map(str, dtypes)))}. Use "
            f"`torch.autocast`, or cast one of them."
        )


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of the logits: that of autocast, which leaves float64 as it is."""
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _default_chunk_size(tokens: int, width: int, classes: int) -> int:
    # Every chunk reads and writes the gradient of the weight once, so it should not be much smaller than the width.
    needed = max(-(-tokens // -(-classes // width)), -(-width // 4))
    return 1 << (needed - 1).bit_length()


@dataclass
class _Tokens:
    """Losses of tokens and their gradients, computed for one chunk at a time.

    Attributes:
        hidden: Shape (N, H).
        weight: Shape (V, H).
        bias: Shape (V,) or None.
        targets: Shape (N,).
        ignore_index: The target of tokens that do not count.
        smoothing: The label smoothing e.
        z_loss: The coefficient c of the z-loss.
        softcap: The cap s of the logits, or None.
        dtype: Of the matrix products.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float | None
    dtype: torch.dtype

    def run(
        self, size: int, losses: torch.Tensor | None, needed: tuple[bool, ...], factors: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Compute losses, or gradients, or both.

        Args:
            size: Tokens per chunk.
            losses: Receives the loss of each token, shape (N,).
            needed: The gradients to compute, of `hidden`, `weight` and `bias`.
            factors: The gradient of the loss of each token, shape (N,); None: 1.

        Returns:
            The gradients, or None.
        """
        full = torch.promote_types(self.dtype, torch.float32)
        weight, bias = self.weight.to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)
        of_hidden = torch.empty_like(self.hidden) if needed[0] else None
        of_weight = torch.zeros_like(weight, dtype=full) if needed[1] else None
        of_bias = torch.zeros_like(weight[:, 0], dtype=full) if needed[2] else None
        for start in range(0, len(self.targets), size):
            rows = slice(start, start + size)
            inputs, counts = self.hidden[rows].to(self.dtype), self.targets[rows] != self.ignore_index
            labels = torch.where(counts, self.targets[rows], 0)[:, None]
            logits = F.linear(inputs, weight, bias).to(full)
            if self.softcap is not None:
                logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
            log_z = logits.logsumexp(1, keepdim=True)
            if losses is not None:
                losses[rows] = torch.where(counts, self._losses(logits, log_z, labels), 0)
            if True not in needed:
                continue
            scale = counts.to(full) if factors is None else torch.where(counts, factors[rows].to(full), 0)
            slopes = self._differentiate(logits, log_z, labels).mul_(scale[:, None])
            if of_bias is not None:
                of_bias += slopes.sum(0)
            slopes = slopes.to(self.dtype)
            if of_hidden is not None:
                of_hidden[rows] = slopes @ weight
            if of_weight is not None and full is self.dtype:
                of_weight.addmm_(slopes.T, inputs)
            elif of_weight is not None:
                of_weight += slopes.T @ inputs
        return [of_hidden, of_weight, of_bias]

    def _losses(self, logits: torch.Tensor, log_z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return `log Z - (1 - e) x[target] - e mean(x) + c (log Z)^2` of each token."""
        losses = log_z - (1 - self.smoothing) * logits.gather(1, labels)
        if self.smoothing:
            losses = losses - self.smoothing * logits.mean(1, keepdim=True)
        if self.z_loss:
            losses = losses + self.z_loss * log_z.square()
        return losses.squeeze(1)

    def _differentiate(self, logits: torch.Tensor, log_z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each loss w.r.t. the head's output, in place: `(1 + 2 c log Z) softmax(x) - target`.

        The slope of the cap is `1 - (x / s)^2`.
        """
        slope = None if self.softcap is None else 1 - (logits / self.softcap).square()
        gradients = logits.sub_(log_z).exp_()
        if self.z_loss:
            gradients.mul_(1 + 2 * self.z_loss * log_z)
        if self.smoothing:
            gradients.sub_(self.smoothing / logits.shape[1])
        gradients.scatter_add_(1, labels, torch.full_like(log_z, self.smoothing - 1))
        return gradients if slope is None else gradients.mul_(slope)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses, whose gradients are computed in the forward pass; or the loss of each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        softcap: float | None,
        size: int,
        dtype: torch.dtype,
        each: bool,
        differentiable: bool,
    ) -> torch.Tensor:
        """Return the sum of the losses, shape (), or with `each` the losses, shape (N,).

        The first arguments are those of `_Tokens`; `size` is the tokens per chunk; `differentiable` is True if there
        may be a backward pass. With `each`, that pass computes the logits again.
        """
        options = (ignore_index, smoothing, z_loss, softcap, dtype)
        losses = torch.empty_like(targets, dtype=torch.promote_types(dtype, torch.float32))
        needed = tuple(ctx.needs_input_grad[:3]) if differentiable and not each else (False, False, False)
        gradients = _Tokens(hidden, weight, bias, targets, *options).run(size, losses, needed, None)
        ctx.each, ctx.size, ctx.options = each, size, options
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*((hidden, weight, bias, targets) if each else gradients))
        return losses if each else losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the inputs, for the gradient of the losses.

        Raises:
            RuntimeError: The gradients are to be differentiated, or it is the second backward pass.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Not `once_differentiable`, which does not notice that the saved gradients depend on the inputs.
            raise RuntimeError(
                "Gradients of the chunked loss cannot be differentiated, as `create_graph=True` requests. Use "
                "`torch.nn.functional.cross_entropy` with the logits."
            )
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(
                "The loss must have one backward pass: it scales the gradients that the forward pass has computed, in "
                "place, to save memory. Compute the loss again instead of using `retain_graph=True`."
            ) from error
        if ctx.each:
            gradients = _Tokens(*saved, *ctx.options).run(ctx.size, None, ctx.needs_input_grad[:3], grad)
        else:
            gradients = [None if gradient is None else gradient.mul_(grad) for gradient in saved]
        cast = (None if each is None else each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True))
        return *cast, *[None] * 9


def _uses_liger(
    kernel: str | None, hidden: torch.Tensor, dtype: torch.dtype, reduction: str, chunk_size: int | None
) -> bool:
    """Return True if the kernel of liger is requested, or is installed and supports the request.

    Raises:
        ValueError: It is requested, and does not support the other arguments.
    """
    if kernel == "torch" or (kernel is None and (hidden.device.type != "cuda" or torch.compiler.is_compiling())):
        return False
    reasons = {
        f"tensors on the device '{hidden.device.type}'": hidden.device.type != "cuda",
        "float64": dtype is torch.float64,
        '`reduction="none"`': reduction == "none",
        "a `chunk_size`, as it chooses its own": chunk_size is not None,
    }
    unsupported = [reason for reason, applies in reasons.items() if applies]
    if kernel is None:
        return not unsupported and find_spec("liger_kernel") is not None
    if unsupported:
        raise ValueError(f"`kernel='liger'` does not support {' and '.join(unsupported)}. Use `kernel='torch'`.")
    return True


def _sum_with_liger(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return the sum of the losses, shape (), float32.

    Raises:
        MissingConditionalImportError: `liger_kernel` is not installed.
    """
    try:
        kind: Any = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "liger_kernel":
            raise
        raise MissingConditionalImportError(extra_deps_group="liger-kernel", conda_package="liger-kernel") from error
    # Early versions sum the gradient of the weight in the dtype of the weight.
    accurate = {"accum_dtype": torch.float32} if "accum_dtype" in inspect.signature(kind).parameters else {}
    loss = kind(
        ignore_index=ignore_index,
        lse_square_scale=z_loss,
        label_smoothing=smoothing,
        softcap=softcap,
        reduction="sum",  # its mean over no tokens is NaN
        **accurate,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        total: torch.Tensor = loss(
            weight.to(dtype), hidden.to(dtype), targets, None if bias is None else bias.to(dtype)
        )
    return total.float()
