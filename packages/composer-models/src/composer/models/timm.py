"""Image classifiers of timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite


def composer_timm(
    model_name: str,
    pretrained: bool = False,
    num_classes: int = 1000,
    drop_rate: float = 0.0,
    drop_path_rate: float | None = None,
    drop_block_rate: float | None = None,
    global_pool: str | None = None,
    bn_momentum: float | None = None,
    bn_eps: float | None = None,
) -> ComposerClassifier:
    """Create a classifier from a network of timm. The names of its weights are timm's with the prefix `module.`.

    For arguments that are None, the default of the network is used.

    Args:
        model_name: timm's name of the network; `timm.list_models()` lists them.
        pretrained: Load timm's pretrained weights.
        num_classes: Number of classes.
        drop_rate: Probability to drop a feature before the last layer.
        drop_path_rate: Probability to skip a block.
        drop_block_rate: Probability to drop a region.
        global_pool: The type of pooling, for example "avg".
        bn_momentum: Momentum of all batch normalization layers.
        bn_eps: Epsilon of all batch normalization layers.

    Raises:
        ImportError: timm is not installed.
        ValueError: `num_classes` is below 1, or `bn_momentum` or `bn_eps` is given for a network without batch
            normalization.
        RuntimeError: The network is unknown to timm.
        TypeError: The network does not support one of the arguments, for example `drop_block_rate`.

    Example:
        >>> model = composer_timm("resnet18", num_classes=10)  # doctest: +SKIP

    Source: Wightman, "PyTorch Image Models", https://github.com/huggingface/pytorch-image-models.
    Differs: `bn_momentum` and `bn_eps` work for every network with batch normalization, not only for those whose
    constructors take them.
    """
    check_finite(num_classes=num_classes, least=1)
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ImportError(
            "`composer_timm` needs timm, which is not installed. Run `pip install composer-models[timm]`."
        ) from None
    optional = {"drop_path_rate": drop_path_rate, "drop_block_rate": drop_block_rate, "global_pool": global_pool}
    kwargs: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
    network = timm.create_model(
        model_name, pretrained=pretrained, num_classes=num_classes, drop_rate=drop_rate, **kwargs
    )
    layers = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for name, value in (("momentum", bn_momentum), ("eps", bn_eps)):
        if value is not None and not layers:
            raise ValueError(
                f"`bn_{name}` must be None for a network without batch normalization, got {value!r}. Remove it."
            )
        if value is not None:
            for layer in layers:
                setattr(layer, name, value)
    return ComposerClassifier(network, num_classes=num_classes)
