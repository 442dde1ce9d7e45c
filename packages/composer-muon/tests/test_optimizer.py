"""`MuonOptimizer` and `orthogonalize_matrix` against singular value decompositions and plain loops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.muon import MuonOptimizer, orthogonalize_matrix
from composer.testing import deep_compare

# As the sources have them: Jordan et al. 2024, arXiv:2505.16932 (algorithm 1) and arXiv:2502.16982 (section 2.2).
COEFFICIENTS = {
    "quintic": [(3.4445, -4.7750, 2.0315)],
    "polar_express": [
        (8.156555, -22.483293, 15.878770),
        (4.042930, -2.808917, 0.500018),
        (3.891668, -2.772484, 0.506065),
        (3.285754, -2.368129, 0.464490),
        (2.346541, -1.709783, 0.423236),
    ],
}
SCALES = {
    "match_rms_adamw": {(6, 4): 0.2 * 6**0.5, (4, 6): 0.2 * 6**0.5},
    "original": {(6, 4): 1.5**0.5, (4, 6): 1.0},
    "spectral": {(6, 4): 1.5**0.5, (4, 6): (4 / 6) ** 0.5},
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polynomial_of_singular_values(matrix: torch.Tensor, name: str, steps: int, margin: float) -> torch.Tensor:
    """U p(p(...(S / norm))) V^T."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (torch.linalg.vector_norm(matrix) * margin + 1e-7)
    for i in range(steps):
        a, b, c = COEFFICIENTS[name][min(i, len(COEFFICIENTS[name]) - 1)]
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


# ---- the function


def test_the_lazy_name_is_the_function() -> None:
    assert cf.orthogonalize_matrix is orthogonalize_matrix


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 7), st.sampled_from(["quintic", "polar_express"]))
def test_it_is_a_polynomial_of_the_singular_values(rows: int, columns: int, steps: int, name: str) -> None:
    matrix = randn(rows, columns)
    expected = polynomial_of_singular_values(matrix, name, steps, 1.02 if name == "polar_express" else 1.0)

    torch.testing.assert_close(orthogonalize_matrix(matrix, steps, name), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "least", "most"), [("quintic", 0.68, 1.14), ("polar_express", 0.85, 1.15)])
def test_singular_values_are_moved_towards_1(name: str, least: float, most: float) -> None:
    u, v = (torch.linalg.qr(randn(32, 32, seed=seed)).Q for seed in (1, 2))
    matrix = u @ torch.diag(torch.logspace(-1, 0, 32, dtype=torch.float64)) @ v
    singular = torch.linalg.svdvals(orthogonalize_matrix(matrix, 5, name))

    assert least < singular.min()
    assert singular.max() < most


@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("shape", [(12, 24), (48, 12)])
def test_long_matrices_with_small_singular_values_are_exact_enough_in_float32(
    name: str, shape: tuple[int, int]
) -> None:
    """Gram matrices square the singular values: those below 1e-4 of the norm are lost in rounding."""
    u, _, vh = torch.linalg.svd(randn(*shape), full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(-6, 0, 12, dtype=torch.float64)) @ vh
    expected = polynomial_of_singular_values(matrix, name, 5, 1.02 if name == "polar_express" else 1.0)

    # The squares are rounded by 6e-8, where their image may change by the square of its slope at 0 (990, or 484) per
    # unit: at most 6e-2 for a single direction, a part of the entries of 12 x 24. One bfloat16 rounding is 4e-3.
    actual = orthogonalize_matrix(matrix.float(), 5, name).double()
    assert (actual - expected).abs().max() < 1e-2
    torch.testing.assert_close(orthogonalize_matrix(matrix, 5, name), expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("shape", [(8, 8), (8, 24)])
def test_autocast_around_the_step_rounds_nothing(shape: tuple[int, int]) -> None:
    matrix = randn(*shape, dtype=torch.float32)
    expected = orthogonalize_matrix(matrix)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(expected, orthogonalize_matrix(matrix))


def test_a_batch_is_orthogonalized_matrix_by_matrix() -> None:
    batch = randn(2, 3, 6, 4)

    expected = torch.stack([torch.stack([orthogonalize_matrix(each) for each in row]) for row in batch])
    torch.testing.assert_close(orthogonalize_matrix(batch), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_stays_and_the_matrix_is_not_changed(dtype: torch.dtype) -> None:
    matrix = randn(5, 3, dtype=dtype)
    before = matrix.clone()

    assert orthogonalize_matrix(matrix).dtype is dtype
    assert torch.equal(before, matrix)


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalize_matrix(torch.zeros(4, 3)).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"coefficients": "cubic"}, "`coefficients` must be one of 'quintic', 'polar_express', or triples"),
        ({"coefficients": []}, "`coefficients` must be one of"),
        ({"coefficients": [(1.0, 2.0)]}, "`coefficients` must be one of"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        orthogonalize_matrix(torch.ones(2, 2), **arguments)
    with pytest.raises(ValueError, match=message):
        MuonOptimizer([torch.nn.Parameter(torch.ones(2, 2))], **arguments)


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have at least two dimensions, got the shape \(3,\)"):
        orthogonalize_matrix(torch.ones(3))


# ---- the optimizer


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Gram and Schmidt's, column by column; twice, which is exact enough."""
    basis: list[torch.Tensor] = []
    for column in columns.T:
        for _ in range(2):
            for each in basis:
                column = column - (each @ column) * each
        basis.append(column / column.norm())
    return torch.stack(basis, 1)


def slow(weight: torch.Tensor, grads: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """The formulas of the class and of the papers, for one matrix."""
    lr, decay, squares = options["lr"], options["weight_decay"], torch.zeros(len(weight), dtype=weight.dtype)
    momenta, weights = options.get("momentum", (0.95,)), options.get("momentum_weights") or (1.0,)
    buffers = [torch.zeros_like(weight) for _ in momenta]
    beta, every = options.get("soap_beta"), options.get("soap_frequency", 1)
    left, right = (torch.zeros(size, size, dtype=weight.dtype) for size in weight.shape)
    p, q = (torch.eye(size, dtype=weight.dtype) for size in weight.shape)
    v = torch.zeros_like(weight)
    for step, grad in enumerate(grads):
        direction = torch.zeros_like(weight)
        for i, (momentum, share) in enumerate(zip(momenta, weights, strict=True)):
            buffers[i] = momentum * buffers[i] + (1 - momentum) * grad
            looked_ahead = (1 - momentum) * grad + momentum * buffers[i]
            direction = direction + share * (looked_ahead if options["nesterov"] else buffers[i])
        if beta is not None:
            v = beta * v + (1 - beta) * (p.T @ grad @ q) ** 2
            direction = p @ ((p.T @ direction @ q) / (v**0.5 + 1e-8)) @ q.T
            left = beta * left + (1 - beta) * grad @ grad.T
            right = beta * right + (1 - beta) * grad.T @ grad
            if step % every == 0:
                p = orthonormal(left @ p + 1e-6 * left.trace() * p)
                q = orthonormal(right @ q + 1e-6 * right.trace() * q)
        update = polynomial_of_singular_values(direction, "quintic", 5, 1.0)
        if options["normalize"]:
            squares = 0.95 * squares + 0.05 * update.square().mean(1)
            rows = update / (squares.sqrt()[:, None] + 1e-8)
            update = rows * (update.norm() / (rows.norm() + 1e-8))
        if options.get("row_floor"):
            before, unit = update.norm(), SCALES["original"][tuple(update.shape)]
            for i, row in enumerate(update):
                least = options["row_floor"] * weight[i].norm() / unit
                update[i] = row * max(1.0, float(least / row.norm()))
            update = update * before / update.norm()
        update = update * SCALES[options["scale"]][tuple(update.shape)]
        mask = (update * weight >= 0).to(weight.dtype) if options["cautious"] else 1.0
        weight = weight - lr * update - lr * decay * mask * weight
    return weight


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"nesterov": False},
        {"cautious": True},
        {"normalize": True},
        {"momentum": (0.85, 0.98), "momentum_weights": (0.4385, 0.5615)},
        {"momentum": (0.5, 0.9, 0.99), "momentum_weights": (0.5, 1.0, 2.0), "nesterov": False},
        {"row_floor": 0.5},
        {"row_floor": 0.5, "normalize": True},
        {"soap_beta": 0.9},
        {"soap_beta": 0.5, "soap_frequency": 3, "momentum": (0.85, 0.98), "momentum_weights": (0.4385, 0.5615)},
    ],
)
def test_steps_follow_the_formula(shape: tuple[int, int], scale: str, flags: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(randn(*shape))
    options: dict[str, Any] = {"nesterov": True, "cautious": False, "normalize": False, **flags}
    options |= {"lr": 0.1, "weight_decay": 0.5, "scale": scale}
    grads = [randn(*shape, seed=1 + step) for step in range(5)]
    expected = slow(weight.detach().clone(), grads, **options)

    optimizer = MuonOptimizer([weight], **options)
    for grad in grads:
        weight.grad = grad
        optimizer.step()

    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon needs torch 2.9")
@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40)])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_one_step_is_that_of_torch(shape: tuple[int, int], scale: str) -> None:
    grad, options = randn(*shape, dtype=torch.float32), {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.95}
    weights = [torch.nn.Parameter(randn(*shape, seed=4, dtype=torch.float32)) for _ in range(2)]
    ours = MuonOptimizer([weights[0]], scale=scale, **options)
    optimizers = [ours, torch.optim.Muon([weights[1]], adjust_lr_fn=scale, **options)]
    before = weights[0].detach() * (1 - 0.1 * 0.5)
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = grad.clone()
        optimizer.step()

    # torch orthogonalizes in bfloat16, whose rounding of 0.4 % goes through five polynomials of slope up to 3.4.
    difference = (weights[0] - weights[1]).norm() / (weights[0] - before).norm()
    assert difference < 0.02


def stepped(params: list[dict[str, Any]], **options: Any) -> list[torch.Tensor]:
    optimizer = MuonOptimizer(params, lr=0.1, **options)
    for step in range(3):
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                parameter.grad = randn(*parameter.shape, seed=100 * step + i, dtype=parameter.dtype)
        optimizer.step()
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(randn(*shape, seed=7))


@pytest.mark.parametrize("normalize", [False, True])
def test_blocks_of_a_weight_are_matrices_of_their_own(normalize: bool) -> None:
    options: dict[str, Any] = {"normalize": normalize, "cautious": normalize}
    whole = parameter(6, 5)
    (fused,) = stepped([{"params": [whole], "blocks": (2, 4)}], **options)
    grads = [randn(6, 5, seed=100 * step) for step in range(3)]
    for rows in (slice(0, 2), slice(2, 6)):
        alone = torch.nn.Parameter(parameter(6, 5).detach()[rows].clone())
        optimizer = MuonOptimizer([alone], lr=0.1, **options)
        for grad in grads:
            alone.grad = grad[rows].clone()
            optimizer.step()
        torch.testing.assert_close(fused[rows], alone.detach())


def test_a_transposed_weight_is_updated_like_the_weight() -> None:
    (transposed,) = stepped([{"params": [torch.nn.Parameter(parameter(6, 4).detach().T.clone())], "transposed": True}])
    optimizer = MuonOptimizer([plain := parameter(6, 4)], lr=0.1)
    for step in range(3):
        plain.grad = randn(4, 6, seed=100 * step).T
        optimizer.step()

    torch.testing.assert_close(transposed.T, plain.detach())


def test_a_convolution_is_the_matrix_of_its_filters() -> None:
    (conv,) = stepped([{"params": [parameter(4, 3, 2, 2)]}])
    (matrix,) = stepped([{"params": [torch.nn.Parameter(parameter(4, 3, 2, 2).detach().flatten(1))]}])
    # The gradients are the same numbers in both shapes.
    torch.testing.assert_close(conv.flatten(1), matrix)


def test_matrices_of_one_shape_are_computed_together_but_not_mixed() -> None:
    together = stepped([{"params": [parameter(4, 6), parameter(6, 4), parameter(4, 6)]}])
    for i, shape in enumerate([(4, 6), (6, 4), (4, 6)]):
        alone = parameter(*shape)
        optimizer = MuonOptimizer([alone], lr=0.1)
        for step in range(3):
            alone.grad = randn(*shape, seed=100 * step + i)
            optimizer.step()
        torch.testing.assert_close(together[i], alone.detach())


@pytest.mark.parametrize("nesterov", [True, False])
def test_bfloat16_weights_keep_their_momentum(nesterov: bool) -> None:
    weight = torch.nn.Parameter(randn(8, 8, dtype=torch.bfloat16))
    optimizer = MuonOptimizer([weight], lr=0.1, nesterov=nesterov)
    weight.grad = randn(8, 8, seed=1, dtype=torch.bfloat16)
    optimizer.step()

    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], weight.grad * 0.05, rtol=0.02, atol=0.01)


def test_a_row_floor_lifts_the_shortest_rows_and_keeps_the_norm() -> None:
    weight = torch.nn.Parameter(0.2 * randn(6, 4, seed=7))
    plain, floored = (torch.nn.Parameter(weight.detach().clone()) for _ in range(2))
    for each, floor in ((plain, 0.0), (floored, 0.5)):
        optimizer = MuonOptimizer([each], lr=1.0, weight_decay=0.0, scale="original", row_floor=floor)
        each.grad = randn(6, 4) * torch.tensor([1, 1, 1, 1, 1e-3, 0.0], dtype=torch.float64)[:, None]
        optimizer.step()
    updates = [(weight - each).detach() for each in (plain, floored)]
    rows = [update.norm(dim=1) for update in updates]

    torch.testing.assert_close(updates[0].norm(), updates[1].norm())
    assert rows[0][4] < 0.1 * weight[4].norm()
    assert 0.4 * weight[4].norm() < rows[1][4] <= 0.5 * weight[4].norm()
    assert rows[1][5] == 0  # there is no direction to lengthen


@pytest.mark.parametrize("options", [{"row_floor": 0.3825}, {"momentum": (0.85, 0.98)}, {"soap_beta": 0.9}])
def test_an_update_of_zero_moves_nothing(options: dict[str, Any]) -> None:
    weight = parameter(4, 4)
    optimizer = MuonOptimizer([weight], lr=0.1, weight_decay=0.0, **options)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()

    assert torch.equal(weight, parameter(4, 4))


@pytest.mark.parametrize(("options", "sizes"), [({"row_floor": 0.5}, (2, 4)), ({"soap_beta": 0.9}, (3, 3))])
def test_blocks_groups_and_transposed_weights_are_floored_and_preconditioned_as_their_matrices(
    options: dict[str, Any], sizes: tuple[int, int]
) -> None:
    whole = parameter(6, 5)
    before, grads = whole.detach().clone(), [randn(6, 5, seed=seed) for seed in (1, 2)]
    groups = [
        {"params": [whole], "blocks": sizes},
        {"params": [torch.nn.Parameter(before.T.clone())], "blocks": sizes, "transposed": True},
        {"params": [torch.nn.Parameter(before.view(6, 5, 1).clone())], "groups": 3},
    ]
    optimizer = MuonOptimizer(groups, lr=0.1, **options)
    for grad in grads:
        for group, each in zip(optimizer.param_groups, (grad, grad.T, grad.view(6, 5, 1)), strict=True):
            group["params"][0].grad = each.clone()
        optimizer.step()
    fused, transposed, conv = (group["params"][0].detach() for group in optimizer.param_groups)

    def alone(begin: int, end: int) -> torch.Tensor:
        part = torch.nn.Parameter(before[begin:end].clone())
        optimizer = MuonOptimizer([part], lr=0.1, **options)
        for grad in grads:
            part.grad = grad[begin:end].clone()
            optimizer.step()
        return part.detach()

    torch.testing.assert_close(fused, torch.cat([alone(0, sizes[0]), alone(sizes[0], 6)]))
    torch.testing.assert_close(transposed.T, fused)
    torch.testing.assert_close(conv.view(6, 5), torch.cat([alone(i, i + 2) for i in (0, 2, 4)]))


def test_further_momenta_begin_as_the_first_one_is() -> None:
    weight = parameter(4, 6)
    optimizer = MuonOptimizer([weight], lr=0.1)
    weight.grad = randn(4, 6, seed=1)
    optimizer.step()
    first, weight.grad = optimizer.state[weight]["momentum_buffer"].clone(), randn(4, 6, seed=2)
    optimizer.param_groups[0]["momentum"] = (0.85, 0.98)
    optimizer.step()

    buffers = [optimizer.state[weight][name] for name in ("momentum_buffer", "momentum_buffer_1")]
    torch.testing.assert_close(buffers, [first.lerp(weight.grad, 1 - momentum) for momentum in (0.85, 0.98)])


def test_a_tensor_learning_rate_is_not_read() -> None:
    (expected,) = stepped([{"params": [parameter(4, 4)]}])
    weight = parameter(4, 4)
    optimizer = MuonOptimizer([weight], lr=torch.tensor(0.1, dtype=torch.float64))
    for step in range(3):
        weight.grad = randn(4, 4, seed=100 * step)
        optimizer.step()

    torch.testing.assert_close(weight.detach(), expected)


def test_a_resumed_optimizer_continues_identically() -> None:
    def run(steps: range, weight: torch.nn.Parameter, optimizer: MuonOptimizer) -> None:
        for step in steps:
            weight.grad = randn(4, 6, seed=step)
            optimizer.step()

    weight = parameter(4, 6)
    options: dict[str, Any] = {"normalize": True, "momentum": (0.85, 0.98), "row_floor": 0.3825}
    options |= {"soap_beta": 0.9, "soap_frequency": 2}
    optimizer = MuonOptimizer([weight], lr=0.1, **options)
    run(range(3), weight, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = torch.nn.Parameter(weight.detach().clone())
    other = MuonOptimizer([resumed], lr=0.5, **options)
    other.load_state_dict(saved)
    run(range(3, 6), weight, optimizer)
    run(range(3, 6), resumed, other)

    deep_compare(weight.detach(), resumed.detach())


def test_parameters_without_a_gradient_stay() -> None:
    a, b = parameter(4, 4), parameter(4, 4)
    optimizer = MuonOptimizer([a, b], lr=0.1)
    a.grad = randn(4, 4)
    optimizer.step()

    assert torch.equal(b, parameter(4, 4))
    assert b not in optimizer.state


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MuonOptimizer([parameter(4)]), r"must be real matrices .*, got the shape \(4,\)"),
        (lambda: MuonOptimizer([torch.nn.Parameter(torch.ones(2, 2).to(torch.complex64))]), "complex64"),
        (lambda: MuonOptimizer([{"params": [parameter(4, 4)], "blocks": (1, 2)}]), "must divide the 4 outputs"),
        (lambda: MuonOptimizer([{"params": [parameter(4, 4)], "groups": 3}]), "must divide the 4 outputs"),
        (lambda: MuonOptimizer([parameter(4, 4)], lr=-1.0), "`lr` must not be negative"),
        (lambda: MuonOptimizer([parameter(4, 4)], momentum=1.0), "`momentum` and `beta2` must be below 1"),
        (lambda: MuonOptimizer([parameter(4, 4)], momentum=(0.9, 1.0)), "`momentum` and `beta2` must be below 1"),
        (lambda: MuonOptimizer([parameter(4, 4)], momentum=()), "`momentum` and `beta2` must be below 1"),
        (lambda: MuonOptimizer([parameter(4, 4)], momentum_weights=(1.0,)), "must have one weight for each of several"),
        (
            lambda: MuonOptimizer([parameter(4, 4)], momentum=(0.8, 0.9), momentum_weights=(1.0,)),
            "`momentum_weights` must have one weight for each of several momenta",
        ),
        (
            lambda: MuonOptimizer([parameter(4, 4)], momentum=(0.8, 0.9), momentum_weights=(1.0, -1.0)),
            "`momentum_weights` must be .*positive",
        ),
        (lambda: MuonOptimizer([parameter(4, 4)], row_floor=-1.0), "`row_floor` must not be negative"),
        (lambda: MuonOptimizer([parameter(4, 4)], soap_beta=1.0), "`soap_beta` must be"),
        (lambda: MuonOptimizer([parameter(4, 4)], soap_frequency=0), "`soap_frequency` must be at least 1"),
        (lambda: MuonOptimizer([parameter(4, 4)], soap_max_size=0), "`soap_max_size` must be at least 1"),
        (
            lambda: MuonOptimizer([{"params": [parameter(4, 4)], "blocks": (1, 3)}], soap_beta=0.9),
            "`soap_beta` needs weights in float32 or float64 and `blocks` of one size",
        ),
        (lambda: MuonOptimizer([parameter(4, 4)], scale="huge"), "`scale` must be one of 'match_rms_adamw', "),
        (lambda: MuonOptimizer([parameter(4, 4)], lr=float("nan")), "`lr` must be finite"),
    ],
)
def test_wrong_groups_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_gradient_is_refused() -> None:
    weight = parameter(4, 4)
    optimizer = MuonOptimizer([weight])
    weight.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], (4, 4), dtype=torch.float64)

    with pytest.raises(RuntimeError, match="Gradients must be dense"):
        optimizer.step()


def test_the_update_of_a_random_gradient_is_as_large_as_that_of_adamw() -> None:
    weight = torch.nn.Parameter(torch.zeros(256, 512))
    optimizer = MuonOptimizer([weight], lr=1.0, weight_decay=0.0)
    weight.grad = randn(256, 512, dtype=torch.float32)
    optimizer.step()

    # AdamW's updates have a root mean square of 0.2 to 0.4 (arXiv:2502.16982, section 2.2).
    assert 0.15 < weight.detach().square().mean().sqrt() < 0.25


# ---- a fixed norm


def test_matrices_have_the_root_of_their_rows_as_norm_before_each_update() -> None:
    weights = {"conv": randn(6, 3, 2, 2), "blocks": randn(6, 4), "transposed": randn(4, 6)}
    groups = [
        {"params": [torch.nn.Parameter(weights["conv"].clone(memory_format=torch.channels_last))], "groups": 2},
        {"params": [torch.nn.Parameter(weights["blocks"].clone())], "blocks": (2, 4)},
        {"params": [torch.nn.Parameter(weights["transposed"].clone())], "transposed": True},
    ]
    optimizer = MuonOptimizer(groups, lr=0.0, fixed_norm=True)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step()
    conv, blocks, transposed = (group["params"][0].detach() for group in optimizer.param_groups)

    def scaled(part: torch.Tensor, rows: int) -> torch.Tensor:
        return part * rows**0.5 / torch.linalg.vector_norm(part)

    expected = torch.cat([scaled(part, 3) for part in weights["conv"].chunk(2)])
    torch.testing.assert_close(conv, expected, rtol=1e-6, atol=0)
    expected = torch.cat([scaled(weights["blocks"][:2], 2), scaled(weights["blocks"][2:], 4)])
    torch.testing.assert_close(blocks, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(transposed, scaled(weights["transposed"], 6), rtol=1e-6, atol=0)


def test_a_file_without_a_fixed_norm_is_loaded() -> None:
    weight = torch.nn.Parameter(randn(4, 4))
    optimizer = MuonOptimizer([weight], lr=0.1)
    saved = optimizer.state_dict()
    for name in ("fixed_norm", "momentum_weights", "row_floor"):
        del saved["param_groups"][0][name]
    optimizer.load_state_dict(saved)
    weight.grad = torch.ones_like(weight)
    optimizer.step()

    assert torch.isfinite(weight).all()
