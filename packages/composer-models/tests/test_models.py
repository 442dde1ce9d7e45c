"""Every model trains, in every layout and precision, compiled and copied."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from composer.models import (
    ComposerClassifier,
    UNet,
    UNet3D,
    composer_deeplabv3,
    composer_efficientnetb0,
    composer_resnet,
    composer_resnet_cifar,
    composer_timm,
    mnist_model,
    vit_small_patch16,
)

IMAGES = (3, 32, 32)
# A model, the shape of an input, and whether targets are masks.
MODELS = {
    "mnist": (lambda: mnist_model(4), (1, 28, 28), False),
    "resnet9": (lambda: composer_resnet_cifar("resnet_9", 4), IMAGES, False),
    "resnet20": (lambda: composer_resnet_cifar("resnet_20", 4), IMAGES, False),
    "resnet18": (lambda: composer_resnet("resnet18", 4), IMAGES, False),
    "efficientnetb0": (lambda: composer_efficientnetb0(4, drop_connect_rate=0.0), IMAGES, False),
    "vit": (lambda: vit_small_patch16(4, image_size=32, num_layers=2), IMAGES, False),
    "timm": (lambda: composer_timm("resnet10t", num_classes=4), IMAGES, False),
    "deeplabv3plus": (lambda: composer_deeplabv3(4, "resnet18", dice_weight=1.0), IMAGES, True),
    "unet": (lambda: UNet(3, in_channels=3, width=8, levels=3), IMAGES, True),
    "unet with batch norm": (lambda: UNet(3, in_channels=3, width=8, levels=3, norm="batch"), IMAGES, True),
    "unet3d": (lambda: UNet3D(3, in_channels=1, width=4, levels=3), (1, 8, 12, 12), True),
}
FLAT = [name for name in MODELS if name != "unet3d"]


def make(name):
    torch.manual_seed(1)
    factory, shape, masks = MODELS[name]
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(4, (4, *(shape[1:] if masks else ())), generator=generator)
    return factory(), (torch.randn(4, *shape, generator=generator), targets)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_scores_of_the_right_shape_and_its_metrics(name):
    model, batch = make(name)
    model.eval()
    with torch.no_grad():
        outputs = model(batch)
    for metric in [*model.get_metrics(is_train=True).values(), *model.get_metrics(is_train=False).values()]:
        model.update_metric(batch, outputs, metric)

        assert torch.isfinite(metric.compute())
    assert (4, 4, *batch[1].shape[1:]) == outputs.shape
    assert 4 == model.num_classes
    assert isinstance(model, ComposerClassifier)


@pytest.mark.parametrize("name", MODELS)
def test_training_reaches_every_parameter_and_lowers_the_loss(name):
    """By as much as the gradient predicts: a step so small that the order of summation cannot matter, in float64."""
    model, (inputs, targets) = make(name)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses, norms = [], []
    for _ in range(2):  # what follows a weight that begins at zero gets no gradient in the first step
        optimizer.zero_grad()
        torch.manual_seed(3)  # the same dropout in every step
        loss = model.loss(model((inputs.double(), targets)), (inputs, targets))
        loss.backward()
        losses.append(loss.detach())
        norms.append(
            torch.nn.utils.get_total_norm([value.grad for value in model.parameters() if value.grad is not None])
        )
        optimizer.param_groups[0]["lr"] = 1e-7 / norms[-1].item()
        optimizer.step()

    torch.testing.assert_close(1e-7 * norms[0], losses[0] - losses[1], rtol=0.1, atol=0.0)
    without = [key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert [] == without


@pytest.mark.parametrize("name", FLAT)
def test_channels_last_gives_the_same_values_and_is_preserved(name):
    model, (inputs, targets) = make(name)
    model.eval()
    expected = model((inputs, targets))
    model.to(memory_format=torch.channels_last)
    outputs = model((inputs.to(memory_format=torch.channels_last), targets))

    torch.testing.assert_close(expected, outputs, rtol=1e-3, atol=1e-4)


def look(found, key, _, args):
    found[key] = args[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["mnist", "resnet9", "resnet20", "unet with batch norm"])
def test_every_convolution_gets_its_input_in_channels_last(name):
    """Else each would copy it."""
    model, (inputs, targets) = make(name)
    model.to(memory_format=torch.channels_last)
    found = {}
    for key, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(partial(look, found, key))
    model((inputs.to(memory_format=torch.channels_last), targets))

    assert found
    assert [] == [key for key, is_kept in found.items() if not is_kept]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_under_autocast_has_finite_gradients(name):
    model, batch = make(name)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch)
        loss = model.loss(outputs, batch)
    loss.backward()

    assert torch.isfinite(loss)
    assert all(torch.isfinite(value.grad).all() for value in model.parameters())
    assert outputs.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["resnet9", "vit", "deeplabv3plus", "unet"])
def test_a_model_is_one_graph(name):
    """Without a break the compiler can fuse everything. The graph runs as it is: generating code takes long."""
    model, batch = make(name)
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    torch.testing.assert_close(model(batch), compiled(batch))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_one_loss_per_example_and_can_be_copied(name):
    model, batch = make(name)
    model.eval()
    copied = copy.deepcopy(model)
    losses = copied.loss(copied(batch), batch, reduction="none")

    assert 4 == losses.shape[0]
    torch.testing.assert_close(model.loss(model(batch), batch), losses.mean())


@pytest.mark.parametrize("name", ["resnet9", "resnet20", "mnist", "unet", "deeplabv3plus"])
def test_images_may_have_other_sizes(name):
    model, (inputs, targets) = make(name)
    _, _, masks = MODELS[name]
    outputs = model.eval()((torch.randn(2, inputs.shape[1], 27, 35), targets))

    assert ((2, 4, 27, 35) if masks else (2, 4)) == outputs.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_gradients_equal_those_on_the_cpu(name):
    def gradients(device):
        model, batch = make(name)
        model.to(device, torch.float64).eval()  # dropout differs between devices
        inputs, targets = batch[0].to(device, torch.float64), batch[1].to(device)
        model.loss(model((inputs, targets)), (inputs, targets)).backward()
        return {key: parameter.grad.cpu() for key, parameter in model.named_parameters()}

    torch.testing.assert_close(gradients("cuda"), gradients("cpu"), rtol=1e-5, atol=1e-8)
