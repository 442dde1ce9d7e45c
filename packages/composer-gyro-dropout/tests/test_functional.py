"""`GyroDropoutLayer` against its definition, and `apply_gyro_dropout` on models."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf
from composer.algorithms.gyro_dropout import GyroDropoutLayer, apply_gyro_dropout
from composer.algorithms.gyro_dropout.gyro_dropout import _mix_seed
from composer.algorithms.warnings import NoEffectWarning


def layer_of(steps: int = 100, p: float = 0.5, sigma: int = 8, tau: int = 2, seed: int = 0) -> GyroDropoutLayer:
    return GyroDropoutLayer(steps, 1, p, sigma, tau, seed=seed)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def mask_of(layer: GyroDropoutLayer) -> torch.Tensor:
    mask = layer.dropout_mask
    assert mask is not None
    return mask


def test_the_function_is_registered() -> None:
    assert apply_gyro_dropout is cf.apply_gyro_dropout


class TestLayer:
    def test_each_mask_applies_to_an_equal_part_of_the_batch(self) -> None:
        layer = GyroDropoutLayer(iters_per_epoch=196, max_epoch=100, p=0.5, sigma=256, tau=16)
        x = draw(256, 64)
        y = layer(x)
        mask = mask_of(layer)

        assert torch.equal(x * mask / (1 - 0.5), y)
        parts = mask.view(16, 16, 64)
        assert torch.equal(parts[:, :1].expand_as(parts), parts)
        assert 16 == len(parts[:, 0].unique(dim=0))

    @settings(deadline=None)
    @given(
        rows=st.integers(0, 40),
        shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        sigma=st.integers(1, 20),
        steps=st.integers(1, 50),
        data=st.data(),
    )
    def test_batches_of_any_size_and_shape_and_runs_of_any_length(
        self, rows: int, shape: list[int], sigma: int, steps: int, data: Any
    ) -> None:
        tau = data.draw(st.integers(1, sigma))
        layer, x = layer_of(steps, 0.25, sigma, tau), draw(rows, *shape)
        for _ in range(3):
            y = layer(x)
            mask, masks = mask_of(layer), layer.selected_masks
            assert masks is not None
            torch.testing.assert_close(x * mask / 0.75, y)
            used = min(tau, len(masks))
            assert [used, *shape] == list(masks.shape)
            if rows >= used:  # all masks, in order, in parts that differ by one row at most
                sizes = [(n + 1) * rows // used - n * rows // used for n in range(used)]
                assert max(sizes) - min(sizes) <= 1
                starts = [-(-n * rows // used) for n in range(used)]
                assert all(torch.equal(mask[start], masks[n]) for n, start in enumerate(starts))

    def test_few_rows_take_all_masks_in_the_long_run(self) -> None:
        torch.manual_seed(0)
        layer, x = layer_of(steps=10**6, sigma=8, tau=8), torch.ones(2, 32)
        seen = torch.cat([layer(x) for _ in range(100)]).unique(dim=0)

        assert 8 == len(seen)

    def test_all_masks_are_in_use_equally_long_and_then_again(self) -> None:
        layer, x = layer_of(steps=40, sigma=8, tau=2), torch.ones(2, 64)
        assert 10 == layer.iter_num
        first = torch.stack([layer(x) for _ in range(40)])
        again = torch.stack([layer(x) for _ in range(40)])

        assert torch.equal(first, again)
        periods = first.view(4, 10, 2, 64)
        assert torch.equal(periods[:, :1].expand_as(periods), periods)
        assert 8 == len(periods[:, 0].reshape(8, 64).unique(dim=0))

    def test_the_last_masks_may_be_fewer(self) -> None:
        layer, x = layer_of(steps=5, sigma=5, tau=2), torch.ones(4, 64)
        masks = [(layer(x), layer.selected_masks)[1] for _ in range(6)]
        seen = torch.cat([m for m in masks if m is not None])

        assert [2, 2, 2, 2, 1, 1] == [len(m) for m in masks if m is not None]
        assert 5 == len(seen.unique(dim=0))

    @pytest.mark.parametrize(("sigma", "tau"), [(256, 16), (1024, 8)])
    def test_a_run_shorter_than_there_are_masks_changes_them_at_every_step(self, sigma: int, tau: int) -> None:
        layer, x = layer_of(steps=2, sigma=sigma, tau=tau), torch.ones(tau, 64)

        assert 1 == layer.iter_num
        assert not torch.equal(layer(x), layer(x))

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_elements_are_dropped_with_their_probability(self, p: float) -> None:
        n = 64 * 500
        layer = layer_of(p=p, sigma=64, tau=64)
        kept = int(layer(torch.ones(64, 500)).count_nonzero())

        # The binomial standard deviation times 4: exceeded by chance once in 16000 seeds.
        assert abs(kept - n * (1 - p)) < 4 * math.sqrt(n * p * (1 - p))

    def test_layers_and_groups_of_masks_do_not_repeat_each_other(self) -> None:
        x = torch.ones(2, 64)
        seen = torch.cat([layer_of(steps=4, seed=_mix_seed(0, n))(x) for n in range(50)])
        layer = layer_of(steps=4, seed=1)
        seen = torch.cat([seen, *(layer(x) for _ in range(4))])

        assert 108 == len(seen.unique(dim=0))
        # Torch's CPU generator reads 32 bits of a seed: those must differ.
        assert 10**4 == len({_mix_seed(a, b) for a in range(100) for b in range(100)})

    def test_gradients_pass_the_mask(self) -> None:
        for rows in (4, 5):
            layer, x = layer_of(), draw(rows, 6).requires_grad_()
            layer(x).sum().backward()
            assert x.grad is not None
            assert torch.equal(mask_of(layer) * 2.0, x.grad)

    def test_it_is_the_identity_in_evaluation_and_with_nothing_to_drop(self) -> None:
        x = draw(4, 6)
        layer = layer_of().eval()

        assert layer(x) is x
        assert (0, None, None) == (layer.training_step, layer.dropout_mask, layer.selected_masks)
        assert layer_of(p=0)(x) is x
        assert torch.equal(torch.zeros(4, 6), layer_of(p=1)(x))
        assert (4, 6) == layer_of()(torch.zeros(4, 6, device="meta")).shape

    def test_one_example_is_a_batch_of_one(self) -> None:
        layer, x = layer_of(), torch.ones(6)
        y = layer(x)

        assert (6,) == y.shape
        assert 1 == layer.training_step
        assert torch.equal(2.0 * mask_of(layer)[0], y)
        assert () == layer(torch.ones(())).shape

    def test_the_dtype_does_not_change_the_masks(self) -> None:
        layer, x = layer_of(), torch.ones(4, 6)
        expected = layer(x)
        for dtype in (torch.bfloat16, torch.float64, torch.float32):
            y = layer(x.to(dtype))
            assert dtype is y.dtype
            assert torch.equal(expected.to(dtype), y)

    def test_the_layout_is_kept(self) -> None:
        x = draw(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)

        assert layer_of()(x).is_contiguous(memory_format=torch.channels_last)

    def test_masks_of_shorter_sequences_are_cut(self) -> None:
        layer = layer_of()
        long = layer(torch.ones(4, 7, 3))

        assert torch.equal(long[:, :5], layer(torch.ones(4, 5, 3)))
        assert torch.equal(long[:, :5, :2], layer(torch.ones(4, 5, 2)))
        assert torch.equal((long[:, :5] > 0), mask_of_after(layer, torch.ones(4, 5, 3)))
        assert (4, 9, 3) == layer(torch.ones(4, 9, 3)).shape
        assert (9, 3) == layer.shape
        assert (4, 8) == layer(torch.ones(4, 8)).shape

    def test_a_copy_is_independent(self) -> None:
        layer, x = layer_of(), torch.ones(4, 6)
        expected = layer(x)
        other = copy.deepcopy(layer)
        layer.set_step(50)

        assert torch.equal(expected, other(x))

    def test_training_does_not_touch_the_generators_of_torch(self) -> None:
        before = torch.get_rng_state()
        layer_of()(torch.ones(4, 6))

        assert torch.equal(before, torch.get_rng_state())

    def test_it_compiles_to_one_graph_between_selections(self) -> None:
        layer, x = layer_of(steps=8), draw(4, 6)
        layer.driven = True
        layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(6):
                layer.set_step(step)
                assert torch.equal(layer(x), compiled(x))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"p": 1.5}, r"`p` must be in \[0, 1\], got 1.5"),
            ({"tau": 0}, r"`tau` must be at least 1 and at most `sigma`, got 0 and 256"),
            ({"tau": 257}, r"`tau` must be at least 1 and at most `sigma`, got 257 and 256"),
            ({"max_epoch": 0}, r"`iters_per_epoch` and `max_epoch` must be positive, got 0 steps"),
        ],
    )
    def test_values_out_of_range_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        arguments = {"iters_per_epoch": 1, "max_epoch": 1, **arguments}
        with pytest.raises(ValueError, match=message):
            GyroDropoutLayer(**arguments)
        with pytest.raises(ValueError, match=message):
            apply_gyro_dropout(nn.Sequential(nn.Dropout()), **arguments)


def mask_of_after(layer: GyroDropoutLayer, x: torch.Tensor) -> torch.Tensor:
    layer(x)
    return mask_of(layer)


class TestApply:
    def test_layers_keep_their_own_probability_unless_one_is_given(self) -> None:
        for given_p, expected in ((None, [0.1, 0.5]), (0.3, [0.3, 0.3])):
            model: Any = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Dropout())).eval()
            apply_gyro_dropout(model, 10, 2, given_p, sigma=4, tau=2)
            layers = [model[0], model[1][0]]
            assert [GyroDropoutLayer] * 2 == [type(layer) for layer in layers]
            assert expected == [layer.p for layer in layers]
            assert [10, 10] == [layer.iter_num for layer in layers]
            assert not any(layer.training for layer in layers)

    def test_layers_have_different_masks_that_follow_from_the_seed(self) -> None:
        def outputs(seed: int | None) -> list[torch.Tensor]:
            model = nn.Sequential(nn.Dropout(), nn.Dropout())
            apply_gyro_dropout(model, 10, 2, seed=seed)
            return [layer(torch.ones(16, 64)) for layer in model]

        first, second = outputs(5)
        assert not torch.equal(first, second)
        assert all(torch.equal(a, b) for a, b in zip([first, second], outputs(5), strict=True))
        assert not torch.equal(first, outputs(6)[0])
        torch.manual_seed(0)
        drawn = outputs(None)
        assert not torch.equal(drawn[0], outputs(None)[0])
        torch.manual_seed(0)
        assert torch.equal(drawn[0], outputs(None)[0])

    def test_layers_that_drop_nothing_or_override_forward_stay(self) -> None:
        class Other(nn.Dropout):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return input

        model = nn.Sequential(nn.Dropout(0), Other(), nn.Dropout2d(), nn.Dropout())
        apply_gyro_dropout(model, 10, 2)
        assert [nn.Dropout, Other, nn.Dropout2d, GyroDropoutLayer] == [type(layer) for layer in model]
        before = model[3]
        apply_gyro_dropout(model, 10, 2, p=0.4)
        assert GyroDropoutLayer is type(model[0])
        assert before is model[3]

    @pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2), nn.Dropout(0)), nn.Dropout()])
    def test_a_model_without_dropout_gets_a_warning(self, model: nn.Module) -> None:
        with pytest.warns(
            NoEffectWarning, match=r"`apply_gyro_dropout` changed nothing: the model has no `torch.nn.Dropo"
        ):
            apply_gyro_dropout(model, 10, 2)
