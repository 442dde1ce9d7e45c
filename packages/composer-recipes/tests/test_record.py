"""The recipe `cifar10_record` against a short loop of the record's own formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from composer.core import Callback, State
from composer.datasets import DeviceLoader, ImageTransform
from composer.loggers import Logger
from composer.recipes.cifar10_record import TASK, Network, Training
from composer.recipes.runner import trainer_of_run

BATCH, BATCHES_PER_EPOCH, EPOCHS, WHITENING_BIAS_EPOCHS = 20, 2, 3, 2
TOTAL, WHITENING_TOTAL = BATCHES_PER_EPOCH * EPOCHS, BATCHES_PER_EPOCH * WHITENING_BIAS_EPOCHS


class Recorder(Callback):
    """Keeps the weights and statistics before the first batch, and the batches."""

    def __init__(self) -> None:
        self.initial: dict[str, Tensor] = {}
        self.batches: list[tuple[Tensor, Tensor]] = []

    def before_forward(self, state: State, logger: Logger) -> None:
        if not self.batches:
            self.initial = {key: value.clone() for key, value in state.model.state_dict().items()}
        self.batches.append(tuple(part.clone() for part in state.batch))


class RecordLoop:
    """The record's network, optimizers and schedules, from given weights. Its loss is the sum over a batch."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        named = list(weights.items())
        self.whitening, self.whitening_bias = (value for _, value in named[:2])
        self.filters = [value for key, value in named if value.dim() == 4][1:]
        self.biases = [value for key, value in named if key.endswith(".bias")][1:]
        self.means = [value for key, value in named if key.endswith("running_mean")]
        self.variances = [value for key, value in named if key.endswith("running_var")]
        self.head = named[-1][1]
        for trained in (self.whitening_bias, *self.filters, *self.biases, self.head):
            trained.requires_grad_()
        decay = 2e-6 * BATCH
        groups: list[dict[str, Any]] = [
            {"params": params, "lr": lr, "weight_decay": decay / lr}
            for params, lr in (([self.whitening_bias], 0.053), (self.biases, 0.053), ([self.head], 0.67))
        ]
        self.sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
        self.rates = [group["lr"] for group in groups]
        self.momenta = [torch.zeros_like(weight) for weight in self.filters]

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(F.conv2d(x, self.whitening, self.whitening_bias))
        for index, weight in enumerate(self.filters):
            x = F.conv2d(x, weight, padding=1)
            if index % 2 == 0:
                x = F.max_pool2d(x, 2)
            statistics = self.means[index], self.variances[index]
            x = F.batch_norm(x, *statistics, None, self.biases[index], training=True, momentum=0.4, eps=1e-12)
            x = F.gelu(x)
        features = F.max_pool2d(x, 3).flatten(1)
        return features @ self.head.T / features.shape[1]

    def step(self, x: Tensor, y: Tensor, index: int) -> None:
        self.sgd.zero_grad()
        F.cross_entropy(self.forward(x), y, label_smoothing=0.2, reduction="sum").backward()
        if index >= WHITENING_TOTAL:
            self.whitening_bias.grad = None
        done = max(0, index - 1)  # the schedules of the recipe lag by one batch; the record has `index` here
        ends = WHITENING_TOTAL, TOTAL, TOTAL
        for group, rate, end in zip(self.sgd.param_groups, self.rates, ends, strict=True):
            group["lr"] = rate * (1 - done / end)
        self.sgd.step()
        with torch.no_grad():
            for weight, momentum in zip(self.filters, self.momenta, strict=True):
                gradient = weight.grad
                assert gradient is not None
                momentum.mul_(0.6).add_(gradient)
                x = (gradient + 0.6 * momentum).flatten(1)
                x = x / x.norm()
                for _ in range(3):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                weight.mul_(len(weight) ** 0.5 / weight.norm())
                weight.sub_(0.24 * (1 - done / TOTAL) * x.view_as(weight))
                weight.grad = None


def test_the_composed_recipe_is_the_loop_of_the_record() -> None:
    images = torch.randint(256, (BATCH * BATCHES_PER_EPOCH, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, images.shape[:1])
    # In float64, because the differences of float32 grow tenfold in some steps.
    transform = ImageTransform(padding=2, padding_mode="reflect", mean=[125.0] * 3, std=[63.0] * 3, dtype=torch.float64)
    training = Training(
        EPOCHS,
        head_lr=0.67 * BATCH,  # for the mean of the loss
        bias_lr=0.053 * BATCH,
        whitening_bias_epochs=WHITENING_BIAS_EPOCHS,
        weight_decay=2e-6 * BATCH,
    )
    whitening = {"bias_duration": f"{WHITENING_BIAS_EPOCHS}ep"}
    recorder = Recorder()
    with trainer_of_run(
        lambda: Network(width=4).build(SimpleNamespace(num_classes=10, shape=(3, 32, 32))).double(),
        lambda device: (DeviceLoader(images, labels, BATCH, transform=transform, device=device), None),
        training,
        num_batches=TOTAL,
        seed=0,
        device="cpu",
        algorithms=TASK.make_algorithms(arguments={**TASK.tuned, "whitening": whitening}),
        callbacks=[recorder],
    ) as (trainer, _, _):
        trainer.fit()
        composed = trainer.state.model.state_dict()

    loop = RecordLoop(recorder.initial)
    for index, (x, y) in enumerate(recorder.batches):
        loop.step(x, y, index)

    assert TOTAL == len(recorder.batches)
    for key, expected in recorder.initial.items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(composed[key], expected, rtol=1e-3, atol=1e-5, check_dtype=False, msg=key)


def test_the_learning_rates_of_the_recipe_are_those_of_the_record_times_its_batch_size() -> None:
    batch_size = TASK.data.batch_size

    assert (
        Training(head_lr=0.67 * batch_size, bias_lr=0.053 * batch_size, weight_decay=2e-6 * batch_size) == TASK.training
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"head_lr": 0.0}, "`head_lr` must be positive, got 0.0"),
        ({"bias_lr": -1.0}, "`bias_lr` must be positive, got -1.0"),
        ({"whitening_bias_epochs": 0}, "`whitening_bias_epochs` must be at least 1, got 0"),
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\), got 1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Training(**arguments)
