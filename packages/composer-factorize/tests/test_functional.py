"""The factors against the best ones, and the layers against torch's own."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer.algorithms.factorize import (
    FactorizedConv2d,
    FactorizedLinear,
    LowRankSolution,
    factorize_conv2d,
    factorize_matrix,
    factorizing_could_speedup,
)

SLACK = 1e-8


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def applied(X: torch.Tensor, solution: LowRankSolution) -> torch.Tensor:
    assert solution.Wa is not None
    Y = X @ solution.Wa
    if solution.Wb is not None:
        Y = Y @ solution.Wb
    return Y if solution.bias is None else Y + solution.bias


def best_nmse(X: torch.Tensor, Y: torch.Tensor, rank: int) -> float:
    """Return the lower bound for products of that rank, from the singular values of the outputs of the best map."""
    X, Y = X.double(), Y.double()
    fitted = X @ torch.linalg.pinv(X) @ Y
    U, S, Vh = torch.linalg.svd(fitted, full_matrices=False)
    cut = U[:, :rank] @ torch.diag(S[:rank]) @ Vh[:rank]
    return float((Y - cut).square().mean() / Y.var())


class TestFactorizeMatrix:
    @pytest.mark.parametrize("rank", [1, 2, 4, 7])
    def test_it_approaches_the_best_factors(self, rank: int) -> None:
        X, W = draw(64, 12), draw(12, 9, seed=1)
        Y = X @ W + 0.1 * draw(64, 9, seed=2)
        solution = factorize_matrix(X, Y, W, rank=rank, n_iters=60)

        assert rank == solution.rank
        assert pytest.approx(best_nmse(X, Y, rank), rel=1e-3) == solution.nmse
        assert pytest.approx(float((Y - applied(X, solution)).square().mean() / Y.var()), rel=1e-4) == solution.nmse

    @settings(deadline=None, max_examples=40)
    @given(
        rows=st.integers(2, 24), D=st.integers(2, 9), M=st.integers(2, 9), bias=st.booleans(), seed=st.integers(0, 99)
    )
    def test_more_rank_and_more_iterations_do_not_hurt(self, rows: int, D: int, M: int, bias: bool, seed: int) -> None:
        X, Y, W = draw(rows, D, seed=seed), draw(rows, M, seed=seed + 1), draw(D, M, seed=seed + 2)
        b = torch.zeros(M) if bias else None
        errors = [factorize_matrix(X, Y, W, bias=b, rank=1, n_iters=n).nmse for n in range(5)]
        assert all(later <= earlier + SLACK for earlier, later in itertools.pairwise(errors))

        errors = [factorize_matrix(X, Y, W, bias=b, rank=r, n_iters=40).nmse for r in range(1, min(D, M))]
        errors.append(factorize_matrix(X, Y, W, bias=b, rank=min(D, M)).nmse)
        assert errors[-1] <= min(errors) + SLACK  # one factor is the best of all
        assert errors[-1] >= 0
        assert not bias or errors[0] < 1 + SLACK

    def test_a_large_rank_gives_the_one_best_factor(self) -> None:
        X, W = draw(64, 8), draw(8, 6, seed=1)
        for rank in (6, 8, 9):
            solution = factorize_matrix(X, X @ W, torch.zeros(8, 6), rank=rank)
            assert (-1, None) == (solution.rank, solution.Wb)
            assert solution.Wa is not None
            torch.testing.assert_close(W, solution.Wa)

    def test_factors_of_a_lower_rank_are_returned_as_they_are(self) -> None:
        X, Wa, Wb, bias = draw(64, 8), draw(8, 3, seed=1), draw(3, 6, seed=2), draw(6, seed=3)
        for rank in (3, 4):
            solution = factorize_matrix(X, X @ Wa @ Wb + bias, Wa, Wb, bias, rank=rank)
            assert (solution.Wa is Wa, solution.Wb is Wb, solution.bias is bias, solution.rank) == (
                True,
                True,
                True,
                -1,
            )
            assert solution.nmse < 1e-10

    def test_the_bias_is_the_best_one(self) -> None:
        """The given bias is not used: outputs and inputs are far from zero here."""
        X, W = draw(64, 8) + 5, draw(8, 6, seed=1)
        Y = X @ W + 7
        for bias in (torch.zeros(6), draw(6, seed=3)):
            solution = factorize_matrix(X, Y, W, bias=bias, rank=2, n_iters=20)
            assert solution.bias is not None
            residual = Y - applied(X, solution)
            torch.testing.assert_close(torch.zeros(6), residual.mean(0), atol=1e-4, rtol=0)
            centred = best_nmse(X - X.mean(0), Y - Y.mean(0), 2) * float((Y - Y.mean(0)).var() / Y.var())
            assert pytest.approx(centred, rel=1e-2) == solution.nmse

    @pytest.mark.parametrize(("rank", "expected"), [(0.25, 2), (0.01, 1), (0.5, 4), (0.99, 3)])
    def test_a_fraction_is_of_the_inputs_but_no_more_than_the_columns(self, rank: float, expected: int) -> None:
        Wa, Wb = (draw(8, 6, seed=1), None) if expected != 3 else (draw(8, 3, seed=1), draw(3, 6))
        solution = factorize_matrix(draw(64, 8), draw(64, 6), Wa, Wb, rank=rank)

        assert (expected if Wb is None else -1) == solution.rank

    def test_inputs_may_be_linearly_dependent(self) -> None:
        X, W = draw(64, 2) @ draw(2, 8, seed=4), draw(8, 6, seed=1)
        solution = factorize_matrix(X, X @ W, W, rank=2)

        assert solution.nmse < 1e-8

    def test_dtype_is_kept_and_inputs_stay(self) -> None:
        X, Y, W = draw(64, 8).bfloat16(), draw(64, 6).bfloat16(), draw(8, 6, seed=1).bfloat16()
        before = [x.clone() for x in (X, Y, W)]
        solution = factorize_matrix(X, Y, W, bias=torch.zeros(6), rank=2)

        assert [torch.bfloat16] * 3 == [t.dtype for t in (solution.Wa, solution.Wb, solution.bias) if t is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, (X, Y, W), strict=True))

    def test_constant_outputs_have_no_variance_to_explain(self) -> None:
        assert 0 == factorize_matrix(draw(8, 4), torch.zeros(8, 4), torch.zeros(4, 4), rank=1).nmse

    def test_shapes_that_do_not_match_are_refused(self) -> None:
        with pytest.raises(
            RuntimeError, match=r"`X` and `Y` must be matrices with the same number of rows, got \(4, 2\) and \(5, 2\)"
        ):
            factorize_matrix(draw(4, 2), draw(5, 2), draw(2, 2))
        with pytest.raises(RuntimeError, match=r"`Wa` and `Wb` must multiply to 2 by 3, got \(2, 2\)"):
            factorize_matrix(draw(4, 2), draw(4, 3), draw(2, 2))
        with pytest.raises(ValueError, match=r"The rank must be positive, got 0"):
            factorize_matrix(draw(4, 2), draw(4, 2), draw(2, 2), rank=0)


class TestFactorizeConv:
    @pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 2, "padding": (1, 0)}, {"dilation": 2}])
    def test_filters_of_low_rank_are_found(self, options: dict[str, Any]) -> None:
        X, Wa, Wb = draw(2, 4, 9, 8), draw(3, 4, 3, 3, seed=1), draw(8, 3, 1, 1, seed=2)
        whole = torch.einsum("ok,kihw->oihw", Wb[:, :, 0, 0], Wa)
        bias = draw(8, seed=3)
        solution = factorize_conv2d(X, whole, rank=3, biasA=bias, **options)

        assert solution.Wa is not None
        assert solution.Wb is not None
        assert ((3, 4, 3, 3), (8, 3, 1, 1)) == (solution.Wa.shape, solution.Wb.shape)
        actual = F.conv2d(F.conv2d(X, solution.Wa, **options), solution.Wb, solution.bias)
        torch.testing.assert_close(F.conv2d(X, whole, bias, **options), actual, atol=1e-3, rtol=1e-3)

    def test_two_convolutions_are_made_thinner(self) -> None:
        X, Wa, Wb = draw(2, 4, 9, 8), draw(6, 4, 3, 3, seed=1), draw(8, 6, 1, 1, seed=2)
        biases = draw(6, seed=3), draw(8, seed=4)
        solutions = [factorize_conv2d(X, Wa, Wb, r, *biases, padding=1) for r in range(1, 6)]
        errors = [solution.nmse for solution in solutions]

        assert sorted(errors, reverse=True) == errors
        assert 1 > errors[0]
        assert solutions[1].Wa is not None
        assert (2, 4, 3, 3) == solutions[1].Wa.shape

    def test_a_bias_only_of_the_second_convolution_is_a_bias(self) -> None:
        X, Wa, Wb = draw(2, 4, 9, 8), draw(6, 4, 3, 3), draw(8, 6, 1, 1)

        assert factorize_conv2d(X, Wa, Wb, 2, biasB=draw(8)).bias is not None
        assert factorize_conv2d(X, Wa, Wb, 2, biasA=draw(6)).bias is not None
        assert factorize_conv2d(X, Wa, Wb, 2).bias is None

    def test_unsupported_arguments_are_refused(self) -> None:
        with pytest.raises(RuntimeError, match=r"`biasB` is the bias of `Wb` and must not be given without it"):
            factorize_conv2d(draw(1, 2, 4, 4), draw(2, 2, 1, 1), biasB=draw(2))
        with pytest.raises(NotImplementedError, match=r"`groups` must be 1"):
            factorize_conv2d(draw(1, 2, 4, 4), draw(2, 1, 1, 1), groups=2)


@pytest.mark.parametrize(
    ("module", "most"),
    [
        (nn.Linear(8, 8), 3),
        (nn.Linear(7, 5), 2),
        (nn.Linear(64, 48), 27),
        (nn.Linear(10, 10), 4),
        (nn.Conv2d(4, 4, 3), 3),
        (nn.Conv2d(8, 8, 1), 3),
    ],
)
def test_the_largest_rank_that_saves_multiplications(module: Any, most: int) -> None:
    assert [True, False] == [factorizing_could_speedup(module, n) for n in (most, most + 1)]
    fan_in, out = module.weight[0].numel(), module.weight.shape[0]
    assert most * (fan_in + out) < fan_in * out <= (most + 1) * (fan_in + out)


def test_layers_that_cannot_be_sped_up() -> None:
    assert not factorizing_could_speedup(nn.Conv2d(64, 64, 3, groups=2), 1)
    assert not factorizing_could_speedup(nn.ReLU(), 1)
    assert [True, False] == [factorizing_could_speedup(FactorizedLinear(64, 64, latent_features=8), n) for n in (7, 8)]
    assert factorizing_could_speedup(FactorizedConv2d(64, 64, 1, 0.25), 0.2)


class TestLayers:
    def test_a_convolution_has_the_shapes_of_torch(self) -> None:
        options: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 2, "padding_mode": "reflect"}
        conv, x = nn.Conv2d(16, 12, (3, 2), **options), draw(2, 16, 9, 8)
        layer = FactorizedConv2d.from_conv2d(conv, latent_channels=3)

        assert conv(x).shape == layer(x).shape
        assert (16, 12, 3, 3) == (layer.in_channels, layer.out_channels, layer.latent_channels, layer.latent_size)
        assert layer.module0.bias is None
        assert layer.module1.bias is not None
        assert conv(x[0]).shape == layer(x[0]).shape
        conv.weight.data, conv.bias.data = layer.weight.detach(), layer.bias.detach()  # type: ignore[union-attr]
        torch.testing.assert_close(conv(x), layer(x))

    @pytest.mark.parametrize("bias", [False, True])
    def test_a_linear_layer_is_a_product(self, bias: bool) -> None:
        layer = FactorizedLinear.from_linear(nn.Linear(16, 12, bias=bias), latent_features=0.25)
        x = draw(2, 5, 16)

        assert (16, 12, 3, bias) == (
            layer.in_features,
            layer.out_features,
            layer.latent_features,
            layer.bias is not None,
        )
        torch.testing.assert_close(F.linear(x, layer.weight, layer.bias), layer(x))

    @pytest.mark.parametrize(("sizes", "latent"), [((8, 8), 4), ((7, 5), 3), ((10, 10), 0.5)])
    def test_a_rank_that_saves_nothing_is_refused(self, sizes: tuple[int, int], latent: float) -> None:
        with pytest.raises(ValueError, match=r"The latent size must be at most \d to save multiplications"):
            FactorizedLinear(*sizes, latent_features=latent)
        with pytest.raises(ValueError, match=r"The latent size must be at most \d to save multiplications"):
            FactorizedConv2d(*sizes, 1, latent)

    def test_groups_are_refused(self) -> None:
        with pytest.raises(NotImplementedError, match=r"`groups` must be 1, got 2"):
            FactorizedConv2d(16, 16, 3, groups=2)

    def test_resetting_parameters_changes_the_weights(self) -> None:
        for layer in (FactorizedLinear(16, 16), FactorizedConv2d(16, 16, 3)):
            before = layer.module0.weight.clone()
            layer.reset_parameters()
            assert not torch.equal(before, layer.module0.weight)

    @pytest.mark.parametrize("bias", [False, True])
    def test_the_rank_of_a_linear_layer_can_be_lowered_twice(self, bias: bool) -> None:
        layer, x = FactorizedLinear(32, 24, bias, latent_features=12), draw(256, 32)
        with torch.no_grad():  # of rank 8 in truth
            layer.module0.weight[8:] = 0
        layer.module1.weight.requires_grad_(False)
        before = layer(x)
        layer.set_rank(x, 12)
        assert 12 == layer.latent_size
        layer.set_rank(x, 8)
        torch.testing.assert_close(before, layer(x), atol=1e-4, rtol=1e-4)
        layer.set_rank(x.view(16, 16, 32), 4)

        assert ((4, 32), (24, 4)) == (layer.module0.weight.shape, layer.module1.weight.shape)
        assert (4, 4, 4) == (layer.latent_features, layer.module0.out_features, layer.module1.in_features)
        assert [True, False] == [layer.module0.weight.requires_grad, layer.module1.weight.requires_grad]
        error = ((layer(x) - before).square().mean() / before.var()).detach()
        assert 0 < float(error) < 0.9
        with pytest.raises(ValueError, match=r"`rank` must be at most the current one, 4, got 5"):
            layer.set_rank(x, 5)

    @pytest.mark.parametrize(
        "options",
        [
            {"padding": 1},
            {"stride": 2, "padding": (1, 0), "padding_mode": "circular"},
            {"padding": "same", "dilation": 2},
            {"padding": "valid", "stride": 2},
        ],
    )
    def test_the_rank_of_any_convolution_can_be_lowered(self, options: dict[str, Any]) -> None:
        layer, x = FactorizedConv2d(8, 16, 3, 6, **options), draw(4, 8, 9, 8)
        with torch.no_grad():  # of rank 4 in truth
            layer.module0.weight[4:] = 0
        before = layer(x)
        layer.set_rank(x, 4)

        torch.testing.assert_close(before, layer(x), atol=1e-4, rtol=1e-4)
        layer.set_rank(x[0], 2)
        assert (2, 2, 2) == (layer.latent_channels, layer.module0.out_channels, layer.module1.in_channels)
        assert before.shape == layer(x).shape

    def test_export(self) -> None:
        model = nn.Sequential(FactorizedConv2d(8, 8, 3), nn.Flatten(), FactorizedLinear(72, 16)).eval()
        x = draw(2, 8, 5, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch calls TorchScript deprecated
            traced = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]

        torch.testing.assert_close(model(x), traced(x))
        torch.testing.assert_close(model(x), torch.fx.symbolic_trace(model)(x))
        torch.testing.assert_close(model(x), torch.export.export(model, (x,)).module()(x))
