"""Any image classifier of timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer.models._building import check_count
from composer.models.tasks import ComposerClassifier

__all__ = ["composer_timm"]

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


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
    """A network of timm as a classifier. The names of its weights are timm's, behind `module.`.

    Args:
        model_name: timm's name of the network; `timm.list_models()` shows them.
        pretrained: Whether to load the weights that timm has for it.
        num_classes: Number of classes.
        drop_rate: Probability to drop a feature before the last layer.
        drop_path_rate: Probability to skip a block; None for the network's own.
        drop_block_rate: Probability to drop a region; None for the network's own.
        global_pool: How positions are pooled, for example "avg"; None for the network's own.
        bn_momentum: Momentum of every batch normalization; None for the network's own.
        bn_eps: Epsilon of every batch normalization; None for the network's own.

    Raises:
        ImportError: timm is not installed.
        ValueError: `num_classes` is below 1, or `bn_momentum` or `bn_eps` is given for a network without batch
            normalization.
        RuntimeError: timm does not know the network.
        TypeError: The network does not take one of the arguments, for example `drop_block_rate`.

    Example:
        >>> model = composer_timm("resnet18", num_classes=10)  # doctest: +SKIP

    Source: Wightman, "PyTorch Image Models", https://github.com/huggingface/pytorch-image-models.
    Differs: `bn_momentum` and `bn_eps` act on every network with batch normalization, not only on those whose
    constructors take them.
    """
    check_count("num_classes", num_classes)
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ImportError(
            "`composer_timm` needs timm, which is not installed. Run `pip install composer-models[timm]`."
        ) from None
    given = {"drop_path_rate": drop_path_rate, "drop_block_rate": drop_block_rate, "global_pool": global_pool}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    network = timm.create_model(
        model_name, pretrained=pretrained, num_classes=num_classes, drop_rate=drop_rate, **chosen
    )
    _set_batch_norms(network, momentum=bn_momentum, eps=bn_eps)
    return ComposerClassifier(network, num_classes=num_classes)


def _set_batch_norms(network: nn.Module, **values: float | None) -> None:
    layers = [module for module in network.modules() if isinstance(module, _BATCH_NORMS)]
    for name, value in values.items():
        if value is None:
            continue
        if not layers:
            raise ValueError(
                f"`bn_{name}` must be None for a network without batch normalization, got {value!r}. Leave it out."
            )
        for layer in layers:
            setattr(layer, name, value)
