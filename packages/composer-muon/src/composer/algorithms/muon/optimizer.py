"""The optimizer whose update is an orthogonal matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from composer.utils import check_finite, check_flags, check_integers

Coefficients = Sequence[tuple[float, float, float]]

COEFFICIENTS: dict[str, Coefficients] = {
    "quintic": [(3.4445, -4.7750, 2.0315)],
    "polar_express": [
        (8.156555, -22.483293, 15.878770),
        (4.042930, -2.808917, 0.500018),
        (3.891668, -2.772484, 0.506065),
        (3.285754, -2.368129, 0.464490),
        (2.346541, -1.709783, 0.423236),
    ],
}
"""Coefficients (a, b, c) of the polynomials by name; the last are used for all further steps."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}
"""Factors of the update of a matrix, as functions of its number of rows (outputs) and columns (inputs)."""


@torch.no_grad()
def orthogonalize_matrix(
    matrix: Tensor, steps: int = 5, coefficients: str | Coefficients = "quintic", eps: float = 1e-7
) -> Tensor:
    """Return an approximation of the nearest semi-orthogonal matrix: U V^T of the singular value decomposition U S V^T.

    The matrix is divided by its Frobenius norm, so that singular values are at most 1, and `steps` times replaced by

        X = a X + (b X X^T + c (X X^T)^2) X

    which moves all singular values towards 1 with matrix products only. The result has singular values of about 0.7 to
    1.2 with "quintic", and closer to 1 with "polar_express"; those below a hundredth of the norm stay smaller.

    Args:
        matrix: Shape (..., m, n), floating; each matrix of a batch by itself.
        steps: Number of steps, at least 1.
        coefficients: "quintic", "polar_express", or triples (a, b, c) for each step; the last are used for all further
            steps.
        eps: Added to the norm.

    Returns:
        Same shape and dtype. On a GPU, matrices in float32 are computed in bfloat16.

    Raises:
        ValueError: `matrix` has fewer than two dimensions, `steps` is below 1, or `coefficients` is unknown or empty.

    Example:
        >>> singular = torch.linalg.svdvals(orthogonalize_matrix(torch.diag(torch.tensor([3.0, 2.0, 1.0]))))
        >>> bool((singular > 0.68).all() and (singular < 1.14).all())
        True

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; "polar_express": Amsel et
        al., "The Polar Express", arXiv:2505.16932, algorithm 1.
    """
    if matrix.dim() < 2:
        raise ValueError(f"`matrix` must have at least two dimensions, got the shape {tuple(matrix.shape)}.")
    check_integers("Use 5.", steps=steps, least=1)
    polynomials = _polynomials(coefficients, steps)
    # For "polar_express", the singular values of the input must be below 1, even after rounding.
    margin = 1.02 if coefficients == "polar_express" else 1.0
    exact = torch.promote_types(matrix.dtype, torch.float32)
    with _without_autocast(matrix):
        x = matrix.to(torch.bfloat16 if matrix.is_cuda and exact is torch.float32 else exact)
        is_tall = x.size(-2) > x.size(-1)
        if is_tall:
            x = x.mT
        x = x / (torch.linalg.matrix_norm(x, keepdim=True) * margin + eps)
        batch, shape = x.reshape(-1, *x.shape[-2:]), x.shape
        for a, b, c in polynomials:
            gram = batch @ batch.mT
            batch = torch.baddbmm(batch, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), batch, beta=a)
    result: Tensor = batch.reshape(shape).to(matrix.dtype)
    return result.mT if is_tall else result


def _without_autocast(matrix: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast does not round products. Some devices, such as "meta", have no autocast."""
    kind = matrix.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _polynomials(coefficients: str | Coefficients, steps: int) -> Coefficients:
    given = COEFFICIENTS.get(coefficients, ()) if isinstance(coefficients, str) else coefficients
    if not given or any(len(each) != 3 for each in given):
        raise ValueError(
            f"`coefficients` must be one of {', '.join(map(repr, COEFFICIENTS))}, or triples of numbers, got "
            f"{coefficients!r}."
        )
    return [given[min(i, len(given) - 1)] for i in range(steps)]


class MuonOptimizer(torch.optim.Optimizer):
    """Muon: momentum whose matrices are orthogonalized, for the hidden matrices of a network.

    With the gradient g of a matrix w, a step is

        m = m + (1 - momentum) * (g - m)
        u = g + momentum * (m - g)                       (u = m without `nesterov`)
        o = orthogonalize_matrix(u)
        w = (1 - lr * weight_decay) * w - lr * scale * o

    All directions of a matrix get updates of the same size, whatever the size of their gradients. The other weights of
    a model (embeddings, head, norms, biases) need another optimizer; `build_muon` makes both.

    A parameter group may have `blocks`, the sizes of matrices that are stored as one weight, along its outputs, and
    orthogonalized one by one, such as query, key and value; and `transposed`, True for weights of shape (inputs,
    outputs). Weights with more than two dimensions are convolutions: their dimensions after the first are the inputs.
    With `groups` above 1, they are that many matrices.

    With several momenta, each weight has one m for each, and u is the weighted sum of what each of them gives:
    short memories follow the gradient, and long ones average its noise. `group["momentum"]` may be changed between
    steps, for example from (0.95, 0.95) to (0.85, 0.98): until then, all m are equal.

    With `soap_beta`, u is divided by the root of a running mean of squared gradients before it is orthogonalized, in
    the basis in which those gradients are least correlated, as SOAP does:

        v = v + (1 - soap_beta) * ((P^T g Q)^2 - v)
        u = P ((P^T u Q) / (sqrt(v) + 1e-8)) Q^T
        l = l + (1 - soap_beta) * (g g^T - l);  P = qr(l P + 1e-6 * trace(l) * P)
        r = r + (1 - soap_beta) * (g^T g - r);  Q = qr(r Q + 1e-6 * trace(r) * Q)

    with qr the orthogonal factor of the QR decomposition. P and Q begin as the identity, and v, l and r as 0.

    Args:
        params: Matrices and weights of convolutions, or dicts of parameter groups.
        lr: Learning rate. With `scale="match_rms_adamw"`, that of AdamW.
        weight_decay: Decoupled weight decay; each step removes `lr * weight_decay` of the weights.
        momentum: Momentum, in [0, 1), or several.
        nesterov: Use Nesterov momentum.
        scale: "match_rms_adamw": 0.2 * sqrt(max(m, n)) for an m x n matrix, so that an update is as large as one of
            AdamW; "original": sqrt(max(1, m / n)), with learning rates such as 0.02; "spectral": sqrt(m / n).
        steps: Steps of the orthogonalization.
        coefficients: See `orthogonalize_matrix`.
        cautious: Decay only the weights that the update moves towards zero.
        normalize: Divide each row of the orthogonal matrix by the root of a running mean of its squares, and keep the
            norm of the matrix (NorMuon).
        beta2: Decay of that running mean, in [0, 1).
        fixed_norm: Before each update, scale an m x n matrix to the Frobenius norm sqrt(m), in place of weight decay.
            For matrices whose outputs are normalized, which makes them independent of it.
        momentum_weights: The weights of several momenta in u, positive. None: equal weights.
        row_floor: The least norm of a row of o, as a fraction of the norm of that row of w. Shorter rows are lengthened
            to it, and the norm of o is kept. Norms are those with `scale="original"`, whatever `scale` is: rows of o
            have 1 in the root mean square. 0: no floor.
        soap_beta: Decay of the running means of SOAP's preconditioning, in [0, 1); None: no preconditioning.
        soap_frequency: Steps between two changes of P and Q.
        soap_max_size: Matrices with a longer side are not preconditioned.

    Raises:
        ValueError: A number is out of range, `scale` or `coefficients` is unknown, a parameter has fewer than two
            dimensions or is complex, `blocks` do not add up, or, with `soap_beta`, are not equal or the parameter has
            half precision.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4, 4))
        >>> optimizer = MuonOptimizer([weight], lr=0.1, scale="original")
        >>> weight.grad = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> optimizer.step()
        >>> bool((weight.diag() < -0.068).all() and (weight.diag() > -0.114).all())
        True

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. "match_rms_adamw": Liu et
        al., "Muon is Scalable for LLM Training", arXiv:2502.16982, equation 4. `cautious`: Chen et al., "Cautious
        Weight Decay", arXiv:2510.12402, algorithm 1. `normalize`: Li et al., "NorMuon", arXiv:2510.05491, algorithm 1.
        `fixed_norm`: Jordan's CIFAR-10 speedrun with Muon, https://github.com/KellerJordan/cifar10-airbench. Several
        momenta, `row_floor` and the preconditioning: the optimization track of
        https://github.com/KellerJordan/modded-nanogpt; the latter is that of Vyas et al., "SOAP", arXiv:2409.11321,
        algorithms 3 and 4.
    Differs: P and Q begin as the identity, so that the first step is preconditioned; those of SOAP begin as the
        eigenvectors of the first gradient, and its first step moves nothing. The multiples of the traces keep rounding
        from deciding the basis of directions without gradients. `normalize` keeps the norm of the orthogonal matrix, as
        the code of its authors does; the paper sets it to 0.2 * sqrt(m * n), which is almost the same for
        "match_rms_adamw".
    """

    single_pass: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float | Sequence[float] = 0.95,
        nesterov: bool = True,
        *,
        scale: str = "match_rms_adamw",
        steps: int = 5,
        coefficients: str | Coefficients = "quintic",
        cautious: bool = False,
        normalize: bool = False,
        beta2: float = 0.95,
        fixed_norm: bool = False,
        momentum_weights: Sequence[float] | None = None,
        row_floor: float = 0.0,
        soap_beta: float | None = None,
        soap_frequency: int = 1,
        soap_max_size: int = 8192,
    ) -> None:
        check_muon_arguments(momentum, scale, steps, coefficients, beta2, momentum_weights, row_floor)
        check_soap_arguments(soap_beta, soap_frequency, soap_max_size)
        check_finite(lr=lr, weight_decay=weight_decay, least=0)
        check_flags(nesterov=nesterov, cautious=cautious, normalize=normalize, fixed_norm=fixed_norm)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": tuple(momentum) if isinstance(momentum, Sequence) else momentum,
            "nesterov": nesterov,
            "scale": scale,
            "steps": steps,
            "coefficients": coefficients,
            "cautious": cautious,
            "normalize": normalize,
            "beta2": beta2,
            "fixed_norm": fixed_norm,
            "momentum_weights": None if momentum_weights is None else tuple(momentum_weights),
            "row_floor": row_floor,
            "soap_beta": soap_beta,
            "soap_frequency": soap_frequency,
            "soap_max_size": soap_max_size,
            "soap_steps": 0,
            "blocks": None,
            "transposed": False,
            "groups": 1,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Args:
            param_group: `{"params": ...}` and the settings that differ from the arguments.

        Raises:
            ValueError: A parameter is not a matrix, or `blocks` or `groups` do not divide it.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if parameter.dim() < 2 or parameter.is_complex():
                self.param_groups.pop()
                raise ValueError(
                    f"`params` must be real matrices or weights of convolutions, got the shape "
                    f"{tuple(parameter.shape)} and {parameter.dtype}. Use `build_muon`, which gives the other "
                    f"parameters to AdamW."
                )
            outputs = parameter.shape[1 if group["transposed"] else 0]
            if (group["blocks"] is not None and sum(group["blocks"]) != outputs) or outputs % group["groups"]:
                self.param_groups.pop()
                raise ValueError(
                    f"`blocks` and `groups` must divide the {outputs} outputs of a parameter of shape "
                    f"{tuple(parameter.shape)}, got {group['blocks']!r} and {group['groups']!r}."
                )
            is_half = parameter.dtype.itemsize < 4
            if group["soap_beta"] is not None and (is_half or len(set(group["blocks"] or ())) > 1):
                self.param_groups.pop()
                raise ValueError(
                    f"`soap_beta` needs weights in float32 or float64 and `blocks` of one size, got {parameter.dtype} "
                    f"and {group['blocks']!r}. Train in float32 under autocast, or leave `soap_beta` out."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the gradients and returns the loss. It is called once, with gradients enabled.

        Returns:
            The result of `closure`; None without one.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            divided = [_matrices(update, group) for update in self._directions(params, group)]
            if group.get("soap_beta") is not None:  # checkpoints of earlier versions do not have it
                divided = [self._preconditioned(p, parts, group) for p, parts in zip(params, divided, strict=True)]
                group["soap_steps"] += 1
            matrices = [part for parts in divided for part in parts]
            orthogonal = _orthogonalized(matrices, group["steps"], group["coefficients"])
            for parameter, parts in zip(params, divided, strict=True):
                self._move(parameter, [next(orthogonal) for _ in parts], group)
        return loss

    def _directions(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Update the momentum; return the directions of the step, not sharded."""
        grads = [p.grad for p in params if p.grad is not None]
        if any(grad.layout is not torch.strided for grad in grads):
            raise RuntimeError("Gradients must be dense for `MuonOptimizer`, got a sparse one. Use `sparse=False`.")
        momenta = group["momentum"] if isinstance(group["momentum"], Sequence) else [group["momentum"]]
        names = ["momentum_buffer", *(f"momentum_buffer_{i}" for i in range(1, len(momenta)))]
        for parameter in params:
            state = self.state[parameter]
            for name in names:
                if "momentum_buffer" not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                elif name not in state:
                    state[name] = state["momentum_buffer"].clone()
        parts = []
        for name, momentum in zip(names, momenta, strict=True):
            buffers = [self.state[parameter][name] for parameter in params]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            parts.append(list(torch._foreach_lerp(grads, buffers, momentum)) if group["nesterov"] else buffers)
        directions = parts[0]
        if len(parts) > 1:
            weights = group["momentum_weights"] or [1 / len(parts)] * len(parts)
            directions = list(torch._foreach_mul(parts[0], weights[0]))
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                torch._foreach_add_(directions, part, alpha=weight)
        # A sharded matrix is gathered once; every rank orthogonalizes it.
        return [u.full_tensor() if hasattr(u, "full_tensor") else u for u in directions]

    def _preconditioned(self, parameter: Tensor, parts: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Divide the matrices of a direction by the size of their gradients, in the basis of these."""
        if max(parts[0].shape) > group["soap_max_size"]:
            return parts
        grad: Any = parameter.grad
        g = torch.stack(_matrices(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, group))
        state, decay = self.state[parameter], group["soap_beta"]
        if "soap_squares" not in state:
            state["soap_squares"] = torch.zeros_like(g)
            for side, size in (("left", g.shape[1]), ("right", g.shape[2])):
                state[f"soap_{side}"] = g.new_zeros(len(g), size, size)
                state[f"soap_{side}_basis"] = torch.eye(size, dtype=g.dtype, device=g.device).repeat(len(g), 1, 1)
        left, right = state["soap_left_basis"], state["soap_right_basis"]
        with _without_autocast(g):
            roots = state["soap_squares"].lerp_((left.mT @ g @ right).square(), 1 - decay).sqrt()
            # The norm of the result has no meaning: the orthogonalization divides by it.
            result = left @ (left.mT @ torch.stack(parts) @ right / (roots + 1e-8)) @ right.mT
            for side, products in (("left", g @ g.mT), ("right", g.mT @ g)):
                state[f"soap_{side}"].lerp_(products, 1 - decay)
                if group["soap_steps"] % group["soap_frequency"] == 0:
                    means, basis = state[f"soap_{side}"], state[f"soap_{side}_basis"]
                    traces = means.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
                    # Without the second term, rounding would decide the basis of directions without gradients.
                    basis.copy_(torch.linalg.qr(means @ basis + 1e-6 * traces * basis).Q)
        return list(result.unbind())

    def _move(self, parameter: Tensor, parts: list[Tensor], group: dict[str, Any]) -> None:
        """Decay a weight and subtract its orthogonal matrices."""
        lr, decay = group["lr"], group["weight_decay"]
        if group.get("fixed_norm"):  # checkpoints of earlier versions do not have it
            _scale_to_fixed_norm(parameter, group)
        if group["normalize"]:
            parts = self._normalized(parameter, parts, group)
        if group.get("row_floor"):
            parts = _with_row_floor(parameter, parts, group)
        factor = SCALES[group["scale"]]
        parts = [part * factor(*part.shape) for part in parts]
        update = _joined(parts, parameter, group).to(parameter.dtype)
        if hasattr(parameter, "placements"):
            update = _sharded_like(parameter, update)
        if decay and group["cautious"]:
            update = update + torch.where(update * parameter >= 0, parameter, 0.0) * decay
        elif decay:
            parameter.mul_(1 - lr * decay)
        if isinstance(lr, Tensor):
            parameter.sub_(update * lr)
        else:
            parameter.add_(update, alpha=-lr)

    def _normalized(self, parameter: Tensor, parts: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        state = self.state[parameter]
        squares = torch.cat([part.square().mean(1) for part in parts]).to(parameter.dtype)
        if "row_squares" not in state:
            state["row_squares"] = torch.zeros_like(squares)
        means: Tensor = state["row_squares"].lerp_(squares, 1 - group["beta2"])
        normalized = []
        for part, mean in zip(parts, torch.split(means, [len(part) for part in parts]), strict=True):
            rows = part / (mean.sqrt()[:, None] + 1e-8).to(part.dtype)
            norms = [torch.linalg.vector_norm(each) for each in (part, rows)]
            normalized.append(rows * (norms[0] / (norms[1] + 1e-8)))
        return normalized


def check_muon_arguments(
    momentum: float | Sequence[float],
    scale: str,
    steps: int,
    coefficients: str | Coefficients,
    beta2: float,
    momentum_weights: Sequence[float] | None = None,
    row_floor: float = 0.0,
) -> None:
    """Raise an error for arguments of `MuonOptimizer` that are out of range."""
    momenta = momentum if isinstance(momentum, Sequence) else [momentum]
    for each in momenta:
        check_finite(momentum=each, least=0)
    check_finite(beta2=beta2, row_floor=row_floor, least=0)
    check_integers("Use 5.", steps=steps, least=1)
    if not momenta or max(momenta) >= 1 or beta2 >= 1:
        raise ValueError(f"`momentum` and `beta2` must be below 1, got {momentum!r} and {beta2!r}. Use 0.95.")
    if momentum_weights is not None and not isinstance(momentum_weights, Sequence):
        raise TypeError(f"`momentum_weights` must be a sequence of numbers, got {momentum_weights!r}. Use (0.4, 0.6).")
    for weight in momentum_weights or ():
        check_finite(momentum_weights=weight, above=0)
    if momentum_weights is not None and (len(momentum_weights) != len(momenta) or len(momenta) == 1):
        raise ValueError(
            f"`momentum_weights` must have one weight for each of several momenta, got {momentum_weights!r} for "
            f"`momentum={momentum!r}`. Use `momentum=(0.85, 0.98), momentum_weights=(0.4385, 0.5615)`."
        )
    if scale not in SCALES:
        raise ValueError(f"`scale` must be one of {', '.join(map(repr, SCALES))}, got {scale!r}.")
    _polynomials(coefficients, steps)


def check_soap_arguments(soap_beta: float | None, soap_frequency: int, soap_max_size: int) -> None:
    """Raise an error for arguments of the preconditioning of `MuonOptimizer` that are out of range."""
    if soap_beta is not None:
        check_finite("Use 0.9, or None for no preconditioning.", soap_beta=soap_beta, least=0, most=0.9999)
    check_integers("Use 1.", soap_frequency=soap_frequency, least=1)
    check_integers("Use 8192.", soap_max_size=soap_max_size, least=1)


def _matrices(weight: Tensor, group: dict[str, Any]) -> list[Tensor]:
    """Return the matrices of a weight, shape (outputs, inputs)."""
    matrix = weight.mT if group["transposed"] else weight.flatten(1)
    if group["blocks"] is not None:
        return list(torch.split(matrix, list(group["blocks"])))
    return list(matrix.chunk(group["groups"])) if group["groups"] > 1 else [matrix]


def _joined(parts: Iterable[Tensor], parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Undo `_matrices`."""
    matrix = torch.cat(list(parts))
    return matrix.mT if group["transposed"] else matrix.reshape(parameter.shape)


def _scale_to_fixed_norm(parameter: Tensor, group: dict[str, Any]) -> None:
    """Scale each matrix of a weight to the norm of a wide orthogonal one: the root of its number of rows."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    parts = _matrices(whole, group)
    norms = [torch.linalg.vector_norm(part) + 1e-7 for part in parts]
    rows = torch.cat([(len(part) ** 0.5 / norm).expand(len(part)) for part, norm in zip(parts, norms, strict=True)])
    factors = rows if group["transposed"] else rows.view(-1, *(1 for _ in parameter.shape[1:]))
    if hasattr(parameter, "placements"):
        factors = _sharded_like(parameter, factors.expand(parameter.shape))
    parameter.mul_(factors)


def _with_row_floor(parameter: Tensor, parts: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Lengthen short rows of orthogonal matrices to a fraction of the rows of the weight; keep their norms."""
    inputs = [0] if group["transposed"] else list(range(1, parameter.dim()))
    # Squares of half precision would overflow or vanish.
    exact = torch.promote_types(parameter.dtype, torch.float32)
    norms: Any = torch.linalg.vector_norm(parameter, dim=inputs, dtype=exact)
    norms = norms.full_tensor() if hasattr(norms, "full_tensor") else norms
    floored = []
    for part, weights in zip(parts, torch.split(norms, [len(part) for part in parts]), strict=True):
        rows = torch.linalg.vector_norm(part, dim=1, dtype=exact) * SCALES["original"](*part.shape)
        factors = (group["row_floor"] * weights / rows.clamp_min(1e-30)).clamp_min(1)  # a row of zeros stays one
        longer = part * factors[:, None].to(part.dtype)
        before, after = (torch.linalg.vector_norm(each, dtype=exact) for each in (part, longer))
        floored.append(longer * (before / after.clamp_min(1e-30)).to(part.dtype))
    return floored


def _orthogonalized(matrices: list[Tensor], steps: int, coefficients: str | Coefficients) -> Any:
    """Return the orthogonalized matrices in order; matrices of one shape, up to transposition, share a batch."""
    results: list[Tensor] = list(matrices)
    by_shape: dict[Any, list[int]] = {}
    for index, matrix in enumerate(matrices):
        shape = tuple(sorted(matrix.shape))
        by_shape.setdefault((shape, matrix.dtype, matrix.device), []).append(index)
    for ((rows, _), _, _), indices in by_shape.items():
        wide = [matrices[i] if matrices[i].shape[0] == rows else matrices[i].mT for i in indices]
        for index, result in zip(indices, orthogonalize_matrix(torch.stack(wide), steps, coefficients), strict=True):
            results[index] = result if matrices[index].shape[0] == rows else result.mT
    return iter(results)


def _sharded_like(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that every rank has, as a `DTensor`; nothing is communicated."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, parameter.placements)
