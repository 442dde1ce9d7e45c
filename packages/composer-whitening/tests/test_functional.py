"""The filters against their defining property and a slow computation, and what `apply_whitening` changes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer import functional as cf
from composer.algorithms.warnings import NoEffectWarning
from composer.algorithms.whitening import WhiteningConv2d, apply_whitening, compute_whitening_filters, whitening


def draw_images(count: int = 16, channels: int = 3, size: int = 8, seed: int = 0) -> torch.Tensor:
    """Smooth images with a mean, as photographs are."""
    noise = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.avg_pool2d(noise, 3, stride=1, padding=1) + noise.mean(1, keepdim=True) + 0.3


def slow_moment(images: torch.Tensor, kernel: tuple[int, int]) -> torch.Tensor:
    """The mean of the outer products of all patches, one after the other."""
    height, width = images.shape[-2] - kernel[0] + 1, images.shape[-1] - kernel[1] + 1
    patches = [
        image[:, y : y + kernel[0], x : x + kernel[1]].flatten()
        for image in images
        for y in range(height)
        for x in range(width)
    ]
    return sum((torch.outer(patch, patch) for patch in patches[1:]), torch.outer(patches[0], patches[0])) / len(patches)


def make_model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 24, 2, bias=bias), nn.GELU(), nn.Flatten(), nn.Linear(24 * 49, 2)
    return nn.Sequential(*layers)


def test_the_functions_are_registered() -> None:
    assert apply_whitening is cf.apply_whitening
    assert compute_whitening_filters is cf.compute_whitening_filters


@settings(deadline=None, max_examples=20)
@given(
    channels=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    eps=st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**31),
)
def test_the_second_moment_of_the_outputs_is_diagonal(
    channels: int, kernel: tuple[int, int], eps: float, seed: int
) -> None:
    """It is diag(lam / (lam + eps)), with the eigenvalues lam of the second moment of the patches."""
    images = draw_images(6, channels, 6, seed)
    filters = compute_whitening_filters(images, kernel, eps)
    half = channels * kernel[0] * kernel[1]
    outputs = F.conv2d(images, filters[:half]).movedim(1, -1).flatten(0, 2)
    eigenvalues = torch.linalg.eigvalsh(slow_moment(images, kernel)).flip(0)

    assert (2 * half, channels, *kernel) == filters.shape
    assert torch.equal(filters[:half], -filters[half:])
    expected = torch.diag(eigenvalues / (eigenvalues + eps))
    torch.testing.assert_close(expected, outputs.T @ outputs / len(outputs), rtol=1e-8, atol=1e-8)


def test_with_the_numbers_of_the_paper_it_is_exact_to_rounding() -> None:
    images = draw_images(32)
    filters = compute_whitening_filters(images)
    outputs = F.conv2d(images, filters[:12]).movedim(1, -1).flatten(0, 2)
    eigenvalues = torch.linalg.eigvalsh(slow_moment(images, (2, 2))).flip(0)

    assert (24, 3, 2, 2) == filters.shape
    expected = torch.diag(eigenvalues / (eigenvalues + 5e-4))
    # Rounding of the moment, a few eps times its trace, is divided by up to lam_min + 5e-4.
    atol = float(4 * torch.finfo(torch.float64).eps * eigenvalues.sum() / (eigenvalues.min() + 5e-4))
    assert atol < 1e-11
    torch.testing.assert_close(expected, outputs.T @ outputs / len(outputs), rtol=0, atol=atol)


def test_parts_of_the_images_give_the_filters_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    images = draw_images(10)
    expected = compute_whitening_filters(images)
    parts = compute_whitening_filters(iter(images.split(3)))
    monkeypatch.setattr(whitening, "_CHUNK", 2000)
    chunks = compute_whitening_filters(images)

    torch.testing.assert_close(expected, parts)
    torch.testing.assert_close(expected, chunks)


def test_dilated_patches_are_those_of_a_dilated_convolution() -> None:
    images = draw_images()
    filters = compute_whitening_filters(images, eps=0.0, dilation=2)
    outputs = F.conv2d(images, filters[:12], dilation=2).movedim(1, -1).flatten(0, 2)

    torch.testing.assert_close(torch.eye(12, dtype=torch.float64), outputs.T @ outputs / len(outputs))


@pytest.mark.parametrize("bias", [True, False])
def test_the_first_convolution_gets_frozen_filters_and_a_bias_of_zeros(bias: bool) -> None:
    model, images = make_model(bias), draw_images().float()
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(images).sum().backward()
    optimizer.step()
    apply_whitening(model, images, optimizers=optimizer)
    layer = model[0]
    assert isinstance(layer, WhiteningConv2d)

    torch.testing.assert_close(compute_whitening_filters(images).float(), layer.weight.detach())
    torch.testing.assert_close(F.conv2d(images, compute_whitening_filters(images).float()), layer(images).detach())
    assert weight is layer.weight
    assert not weight.requires_grad
    assert weight.grad is None
    assert weight not in optimizer.state
    assert layer.bias is not None
    assert layer.bias.requires_grad
    assert [0.0] * 24 == layer.bias.tolist()
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in optimizer.param_groups[0]["params"]}
    before = layer.weight.clone()
    model(images).sum().backward()
    optimizer.step()
    assert torch.equal(before, layer.weight)
    assert layer.bias.detach().any()


def test_the_layer_works_like_the_convolution_that_it_is_made_from() -> None:
    conv = nn.Conv2d(3, 54, 3, stride=2, padding=1, padding_mode="reflect").double()
    images = draw_images()
    layer = WhiteningConv2d(conv)
    clone = copy.deepcopy(layer)

    assert torch.equal(conv(images), layer(images))
    assert torch.equal(conv(images), clone(images))
    assert repr(conv).removeprefix("Conv2d") == repr(layer).removeprefix("WhiteningConv2d")
    assert list(conv.state_dict()) == list(layer.state_dict())
    assert not layer.is_whitened
    layer.load_state_dict(conv.state_dict())
    assert layer.is_whitened


def test_a_named_layer_of_a_model_is_whitened() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 1)), nn.Conv2d(3, 24, 2, dilation=2))
    apply_whitening(model, draw_images(), layer_name="1")

    assert [nn.Conv2d, WhiteningConv2d] == [type(model[0][0]), type(model[1])]  # type: ignore[index]


def test_applied_again_it_takes_the_new_images() -> None:
    model, images = make_model(), draw_images(seed=1)
    apply_whitening(model, draw_images())
    apply_whitening(model, images)

    torch.testing.assert_close(compute_whitening_filters(images).float(), model[0].weight.detach())
    assert 1 == sum(isinstance(module, nn.Conv2d) for module in model.modules())


def test_a_model_without_a_convolution_is_not_changed() -> None:
    with pytest.warns(NoEffectWarning, match=r"`apply_whitening` changed nothing: the model has no `Conv2d`"):
        apply_whitening(nn.Sequential(nn.Linear(2, 2)), draw_images())


class Special(nn.Conv2d):
    """A convolution of some library."""


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (nn.Conv2d(3, 16, 3), ValueError, r"one group and 2 \* 3 \* 3 \* 3 = 54 outputs.*Conv2d\(3, 24, kernel_size=2"),
        (nn.Conv2d(4, 32, 2, groups=2), ValueError, r"must have one group"),
        (Special(3, 24, 2), TypeError, r"must be a plain `torch.nn.Conv2d`, got Special"),
        (nn.LazyConv2d(24, 2), ValueError, r"must have a shape, got a lazy one"),
        (nn.Conv2d(1, 8, 2), ValueError, r"must have 1 channels.*got shape \(16, 3, 8, 8\)"),
    ],
)
def test_layers_of_another_shape_are_refused(layer: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_whitening(nn.Sequential(layer), draw_images())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`eps` must be at least 0, got -1|`eps` must not be negative, got -1"):
        apply_whitening(make_model(), draw_images(), eps=-1)
    with pytest.raises(ValueError, match=r"`layer_name` must be the name of a `Conv2d` of the model, got '1'"):
        apply_whitening(make_model(), draw_images(), layer_name="1")
    with pytest.raises(TypeError, match=r"must be a floating tensor.*got torch.uint8"):
        compute_whitening_filters(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"must have shape \(N, C, H, W\), got \(3, 8, 8\)"):
        compute_whitening_filters(torch.zeros(3, 8, 8))
    with pytest.raises(ValueError, match=r"There must be at least one image"):
        compute_whitening_filters(torch.zeros(0, 3, 8, 8))
