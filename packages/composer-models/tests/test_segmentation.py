"""DeepLab, the U-Nets, and their loss."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torchvision
from torch import nn
from torchmetrics import MetricCollection
from torchvision.models import ResNet18_Weights

from composer.loss.utils import dense_targets
from composer.metrics import Dice, MIoU
from composer.models import DeepLabV3, UNet, UNet3D, composer_deeplabv3
from composer.models._segmentation import SegmentationLoss
from composer.models.unet import UNetModule


def scores(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(num_classes, *shape, seed=2):
    return torch.randint(num_classes, shape, generator=torch.Generator().manual_seed(seed))


def one_hot(targets, num_classes):
    return nn.functional.one_hot(targets, num_classes).movedim(-1, 1).float()


# --- loss -------------------------------------------------------------------------------------------------------------


def slow_dice(outputs, targets, classes, ignore_index):
    """The Dice loss of every example and class, position by position."""
    losses = []
    for output, target in zip(outputs.softmax(1).flatten(2), targets.flatten(1), strict=True):
        for index in classes:
            overlap = total = 0.0
            for position, label in enumerate(target.tolist()):
                if label == ignore_index:
                    continue
                predicted, wanted = output[index, position].item(), float(label == index)
                overlap += predicted * wanted
                total += predicted + wanted
            losses.append(1 - (2 * overlap + 1e-5) / (total + 1e-5))
    return torch.tensor(losses).reshape(len(outputs), len(classes))


@pytest.mark.parametrize("ignore_index", [-1, 255])
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("size", [(3, 4), (2, 3, 2)])
def test_the_loss_is_the_weighted_sum_of_both(ignore_index, background, size):
    outputs, targets = scores(2, 3, *size), labels(3, 2, *size)
    targets[:, 0] = ignore_index
    dice = slow_dice(outputs, targets, range(3) if background else range(1, 3), ignore_index)
    entropies = [
        nn.functional.cross_entropy(outputs[i : i + 1], targets[i : i + 1], ignore_index=ignore_index) for i in range(2)
    ]
    expected = 0.7 * torch.stack(entropies) + 0.4 * dice.mean(1)
    loss = SegmentationLoss(0.7, 0.4, ignore_index, background)

    torch.testing.assert_close(expected, loss(outputs, targets, reduction="none"))
    torch.testing.assert_close(expected.mean(), loss(outputs, targets))


def test_the_cross_entropy_is_the_mean_over_the_pixels_of_the_batch():
    outputs, targets = scores(2, 3, 4, 4), labels(3, 2, 4, 4)
    targets[0, 1:] = 7
    expected = nn.functional.cross_entropy(outputs, targets, ignore_index=7)

    torch.testing.assert_close(expected, SegmentationLoss(ignore_index=7)(outputs, targets))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dense_targets_give_the_same(reduction):
    outputs, targets = scores(2, 3, 4, 4), labels(3, 2, 4, 4)
    loss = SegmentationLoss(1.0, 1.0, ignore_index=-1)

    torch.testing.assert_close(
        loss(outputs, targets, reduction=reduction), loss(outputs, one_hot(targets, 3), reduction=reduction)
    )


def test_dense_pixels_without_mass_do_not_count():
    outputs, targets = scores(2, 3, 4, 4), labels(3, 2, 4, 4)
    dense = one_hot(targets, 3)
    targets[:, 2], dense[:, :, 2] = -1, 0
    loss = SegmentationLoss(1.0, 1.0, ignore_index=-1)

    torch.testing.assert_close(loss(outputs, targets, reduction="none"), loss(outputs, dense, reduction="none"))


def test_an_example_with_only_ignored_pixels_has_a_finite_loss():
    targets = labels(3, 2, 4, 4)
    targets[0] = 255
    losses = SegmentationLoss(1.0, 1.0, 255)(scores(2, 3, 4, 4), targets, reduction="none")

    assert torch.isfinite(losses).all()


def test_bytes_are_indices():
    outputs, targets = scores(2, 3, 4, 4), labels(3, 2, 4, 4)
    targets[:, 0] = 255
    loss = SegmentationLoss(1.0, 1.0, 255)

    torch.testing.assert_close(loss(outputs, targets), loss(outputs, targets.to(torch.uint8)))


@pytest.mark.parametrize("name", ["cross_entropy_weight", "dice_weight"])
def test_weights_must_not_be_negative(name):
    with pytest.raises(ValueError, match=rf"`{name}` must not be negative, got -1\.0"):
        SegmentationLoss(**{name: -1.0})


def test_a_weight_must_be_positive():
    with pytest.raises(ValueError, match="`cross_entropy_weight` or `dice_weight` must be positive, got 0 for both"):
        composer_deeplabv3(3, "resnet18", cross_entropy_weight=0.0)


def test_the_reduction_must_be_known():
    with pytest.raises(ValueError, match="`reduction` must be 'mean' or 'none', got 'sum'"):
        SegmentationLoss()(scores(2, 3, 4, 4), labels(3, 2, 4, 4), reduction="sum")


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (torch.zeros(2, 1, 4, 4), ValueError, r"indices of shape \(2, 4, 4\) or .* got \(2, 1, 4, 4\)"),
        ([0, 1], TypeError, "The targets must be a tensor .* got list"),
    ],
)
def test_targets_must_fit(targets, error, message):
    with pytest.raises(error, match=message):
        SegmentationLoss()(scores(2, 3, 4, 4), targets)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_models_and_losses_can_be_copied(clone):
    model = composer_deeplabv3(3, "resnet18", dice_weight=0.5, ignore_index=255)

    assert vars(model._loss_fn) == vars(clone(model)._loss_fn)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_deeplab_measures_the_cross_entropy_and_the_mean_iou():
    model = composer_deeplabv3(3, "resnet18", ignore_index=255)
    for is_train in (True, False):
        metrics = model.get_metrics(is_train)
        assert ["CrossEntropy", "MIoU"] == list(metrics)
        assert [255, 255] == [metric.ignore_index for metric in metrics.values()]
    assert model.train_metrics is not model.val_metrics


def test_u_nets_measure_the_dice_coefficient_of_the_foreground():
    for model in (UNet(3, width=2), UNet3D(3, width=2)):
        assert ["Dice"] == list(model.get_metrics(is_train=True))
        assert ["CrossEntropy", "Dice"] == list(model.get_metrics(is_train=False))
        assert 3 == model.get_metrics(is_train=True)["Dice"].num_classes


@pytest.mark.parametrize("metric", [MIoU(3), MIoU(3, ignore_index=255), Dice(3), Dice(2)])
def test_segmentation_metrics_get_the_most_probable_class(metric):
    model = composer_deeplabv3(3, "resnet18")
    outputs, targets = scores(2, 3, 4, 4), labels(3, 2, 4, 4)
    soft = 0.9 * one_hot(targets, 3) + 0.1 / 3
    model.update_metric((None, targets), outputs, metric)
    again = metric.clone()
    again.reset()
    model.update_metric((None, soft), outputs, again)

    torch.testing.assert_close(metric.compute(), again.compute())


def test_a_perfect_segmentation_has_perfect_metrics():
    targets = labels(3, 2, 4, 4)
    model = UNet(2, in_channels=1, width=2, levels=1)
    for metric in (*model.get_metrics(is_train=True).values(), MetricCollection([MIoU(3)])["MIoU"]):
        model.update_metric((None, targets), one_hot(targets, 3), metric)

        assert 100 == metric.compute()


# --- DeepLab ----------------------------------------------------------------------------------------------------------


def randomised(network):
    """Give the normalizations values that a wrong order of layers would show."""
    torch.manual_seed(3)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return network.eval()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_dilation_gives_the_values_of_the_strided_network_at_more_positions(name):
    """The algorithme a trous: every fourth position has the value that the network with strides computes there."""
    if name == "resnet50":  # whose first blocks torchvision dilates less, so the values are those of layer 3
        network = randomised(DeepLabV3(2, name)).backbone
        assert [(1, 1), (2, 2), (2, 2), (4, 4)] == [
            block.conv2.dilation for block in (*network.layer3[:2], *network.layer4[:2])
        ]
    strided = randomised(torchvision.models.get_model(name, weights=None))
    dilated = DeepLabV3(2, name).backbone.eval()
    dilated.load_state_dict({key: value for key, value in strided.state_dict().items() if not key.startswith("fc.")})
    x = scores(1, 3, 64, 64)
    low, high = dilated(x)
    expected_low = strided.layer1(strided.maxpool(strided.relu(strided.bn1(strided.conv1(x)))))
    expected = strided.layer4(strided.layer3(strided.layer2(expected_low)))

    torch.testing.assert_close(expected_low, low)
    assert (8, 8) == high.shape[2:]
    torch.testing.assert_close(expected, high[..., ::4, ::4], rtol=1e-3, atol=1e-4)


def test_deeplabv3_is_torchvisions():
    torch.manual_seed(1)
    with torch.device("meta"):
        network = torchvision.models.segmentation.deeplabv3_resnet50(
            weights=None, weights_backbone=None, num_classes=3, aux_loss=False
        )
    model = composer_deeplabv3(3, "resnet50", use_plus=False).eval()
    network.load_state_dict(model.module.state_dict(), assign=True)
    x = scores(1, 3, 33, 40)

    torch.testing.assert_close(network.eval()(x)["out"], model((x, None)))


def test_the_decoder_of_the_plus_works_at_a_quarter_of_the_resolution():
    network = DeepLabV3(5, "resnet18").eval()
    low, high = network.backbone(torch.zeros(1, 3, 64, 96))

    assert ((1, 64, 16, 24), (1, 512, 8, 12)) == (low.shape, high.shape)
    assert (1, 5, 16, 24) == network.classifier(low, high).shape
    assert [12, 24, 36] == [conv[0].dilation[0] for conv in network.classifier.aspp.convs[1:4]]


def test_the_backbone_has_pretrained_weights_and_the_head_its_initializers(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    network = torchvision.models.resnet18(weights=None)
    torch.save(network.state_dict(), tmp_path / "checkpoints" / ResNet18_Weights.DEFAULT.url.rsplit("/", 1)[1])
    model = composer_deeplabv3(3, "resnet18", "IMAGENET1K_V1", initializers=["bn_uniform"]).module

    torch.testing.assert_close(network.layer4[1].conv2.weight, model.backbone.layer4[1].conv2.weight)
    torch.testing.assert_close(network.bn1.weight, model.backbone.bn1.weight)
    assert not model.classifier.project[1].weight.eq(1).any()


@pytest.mark.parametrize("name", ["resnet9", "vgg16"])
def test_the_backbone_must_be_known(name):
    with pytest.raises(ValueError, match=rf"`backbone_arch` must be one of \['resnet18', .* got '{name}'"):
        composer_deeplabv3(3, name)


def test_there_must_be_classes():
    for make in (composer_deeplabv3, DeepLabV3, UNet, UNet3D):
        with pytest.raises(ValueError, match="`num_classes` must be at least 1, got 0"):
            make(0)


def batch_norms(model):
    return {type(module) for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}


def test_batch_normalization_of_one_process_is_not_changed():
    assert {nn.BatchNorm2d} == batch_norms(composer_deeplabv3(3, "resnet18", sync_bn=True))


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(("sync_bn", "kind"), [(True, nn.SyncBatchNorm), (False, nn.BatchNorm2d)])
def test_batch_normalization_of_several_processes_is_synchronised(two_processes, monkeypatch, sync_bn, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    assert {kind} == batch_norms(composer_deeplabv3(3, "resnet18", sync_bn=sync_bn))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_batch_normalization_cannot_be_synchronised(two_processes):
    with pytest.warns(UserWarning, match="`sync_bn=True` is skipped: torch synchronizes .* only on GPUs"):
        model = composer_deeplabv3(3, "resnet18")

    assert {nn.BatchNorm2d} == batch_norms(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        composer_deeplabv3(3, "resnet18", sync_bn=False)


# --- U-Net ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (4, 5), (1, 1)])
def test_images_of_every_size_have_scores_at_every_pixel(size):
    model = UNet(2, in_channels=1, width=2, levels=3, norm="batch").eval()

    assert (1, 3, *size) == model((torch.zeros(1, 1, *size), None)).shape


@pytest.mark.parametrize("size", [(8, 8, 8), (9, 7, 10)])
def test_volumes_of_every_size_have_scores_at_every_voxel(size):
    model = UNet3D(2, in_channels=1, width=2, levels=3, norm="batch").eval()

    assert (1, 3, *size) == model((torch.zeros(1, 1, *size), None)).shape


@pytest.mark.parametrize("dims", [2, 3])
def test_levels_halve_the_resolution_and_double_the_channels(dims):
    network = UNetModule(dims, 1, 2, 4, 4, "batch").eval()
    x = torch.zeros(1, 1, *(16,) * dims)
    shapes = [tuple((x := level(x)).shape[1:3]) for level in network.down]
    width = 4 * (dims - 1)

    assert [(width, 16), (2 * width, 8), (4 * width, 4), (8 * width, 2)] == shapes


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_the_normalization_is_chosen_by_name(dims, norm):
    names = {type(module).__name__.rstrip("d23") for module in UNetModule(dims, 1, 2, 4, 2, norm).modules()}

    assert {f"{norm.title()}Norm"} == {name for name in names if "Norm" in name}


def test_a_u_net_is_written_out():
    torch.manual_seed(1)
    network = UNetModule(2, 3, 4, 2, 3)

    def conv(x, block, stride=1):
        layer, norm, _ = block
        x = nn.functional.conv2d(x, layer.weight, stride=stride, padding=1)
        mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), correction=0, keepdim=True)
        x = (x - mean) / (variance + 1e-5).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]
        return torch.maximum(x, 0.01 * x)

    def enlarge(x, layer):
        return nn.functional.conv_transpose2d(x, layer.weight, layer.bias, stride=2)

    x = scores(2, 3, 16, 16)
    top = conv(conv(x, network.down[0][0]), network.down[0][1])
    middle = conv(conv(top, network.down[1][0], stride=2), network.down[1][1])
    bottom = conv(conv(middle, network.down[2][0], stride=2), network.down[2][1])
    middle = torch.cat((enlarge(bottom, network.enlarge[0]), middle), dim=1)
    middle = conv(conv(middle, network.up[0][0]), network.up[0][1])
    top = torch.cat((enlarge(middle, network.enlarge[1]), top), dim=1)
    top = conv(conv(top, network.up[1][0]), network.up[1][1])
    expected = torch.einsum("nchw,dc->ndhw", top, network.classifier.weight[..., 0, 0])
    expected += network.classifier.bias[:, None, None]

    torch.testing.assert_close(expected, network(x), rtol=1e-4, atol=1e-5)


def test_every_pixel_sees_the_same_place_of_the_image():
    """Shifting the image by the coarsest step shifts the scores."""
    torch.manual_seed(1)
    network = UNetModule(2, 1, 2, 4, 3, "batch").eval()
    image = torch.zeros(1, 1, 64, 64)
    image[..., 30:34, 26:30] = 1
    expected = network(image).roll((4, 8), dims=(2, 3))

    torch.testing.assert_close(expected[..., 20:44, 20:44], network(image.roll((4, 8), dims=(2, 3)))[..., 20:44, 20:44])


@pytest.mark.parametrize("dims", [2, 3])
def test_the_surplus_of_odd_sizes_is_cut_at_the_far_end(dims):
    torch.manual_seed(1)
    network = UNetModule(dims, 1, 2, 2, 2, "batch").eval()
    image = torch.randn(1, 1, *(25,) * dims)
    near = (..., *(slice(4),) * dims)

    torch.testing.assert_close(network(nn.functional.pad(image, (0, 1) * dims))[near], network(image)[near])


def test_volumes_are_segmented_slice_by_slice():
    model = UNet(2, in_channels=3, width=2, levels=2).eval()
    volumes = scores(2, 3, 5, 8, 9)
    expected = torch.stack([model((volumes[:, :, index], None)) for index in range(5)], dim=2)

    torch.testing.assert_close(expected, model.inference2d(volumes))


def test_groups_divide_the_channels():
    groups = [m.num_groups for m in UNetModule(2, 1, 2, 12, 2, "group").modules() if isinstance(m, nn.GroupNorm)]

    assert [4, 4, 8, 8, 4, 4] == groups


@pytest.mark.parametrize("name", ["in_channels", "width", "levels"])
def test_numbers_must_be_positive(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        UNet(**{name: 0})


def test_the_normalization_must_be_known():
    with pytest.raises(ValueError, match=r"`norm` must be one of \['batch', 'group', 'instance'\], got 'layer'"):
        UNet3D(norm="layer")


def test_dimensions_are_two_or_three():
    with pytest.raises(ValueError, match="`dims` must be 2 or 3, got 1"):
        UNetModule(1, 1, 2, 4, 2)


def test_rescaled_targets_leave_the_dice_loss_as_it_is():
    """With ignored positions, algorithms multiply the other ones for the mean of the cross entropy."""
    torch.manual_seed(0)
    loss, outputs, targets = SegmentationLoss(1.0, 0.5, 255), torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    targets[0] = 255
    dense = dense_targets(targets, 3, ignore_index=255, rescale=True)

    torch.testing.assert_close(loss(outputs, targets), loss(outputs, dense))
