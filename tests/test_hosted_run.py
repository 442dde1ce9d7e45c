"""A loop written by hand around `HostedRun` gives the weights of a `Trainer`, bit for bit, with every algorithm."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import ARGUMENTS, CLASSES, LANGUAGE, LOWER_PRECISION, Captioned, Classifier, captioned, make, noise
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.core import ConflictError, Precision
from composer.loop import HostedRun
from composer.testing import deep_compare

SEED, EPOCHS, LENGTH, BATCH = 3, 2, 5, 8
# They act on ten steps.
OF_TEN_STEPS: dict[str, dict[str, Any]] = {
    # Cut sequences are more rows than the batches of the loader, and the Trainer splits them to that size.
    "Alibi": {"max_sequence_length": 32, "train_sequence_length_scaling": 1.0},
    "BatchSizeWarmup": {"initial_batch_size": 4, "duration": "24sp"},
    "LayerFreezing": {"freeze_start": 0.0, "freeze_level": 1.0},
    "SWA": {"swa_start": "0.1dur", "swa_end": "0.8dur", "update_interval": "1ba"},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.9, "drop_warmup": "9ba"},
    "Whitening": {"num_images": 8, "bias_duration": "4ba"},
}
MORE = {
    "LayerFreezing and SAM": ("LayerFreezing", "SAM"),
    "MixUp, SAM and LabelSmoothing": ("MixUp", "SAM", "LabelSmoothing"),
    "nothing": (),
}
CASES = {name: (name,) for name in sorted(CLASSES)} | MORE
# The cases in which a host accumulates or lowers the precision: one of each kind. Each host has the weights of the
# Trainer with every method, and `HostedRun`, which drives all hosts, also has them in these two ways.
SAMPLED = [
    "BlurPool",
    "ColOut",
    "CutOut",
    "Distillation",
    "EMA",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "ZLoss",
    *MORE,
]
# They choose or draw once per batch of the loader, which is half a batch of the Trainer with accumulation.
PER_BATCH_OF_THE_LOADER = ("ColOut", "CutOut", "SelectiveBackprop")
# They add a term to the loss. The gradients of both terms meet at the outputs, in whose precision they are summed.
ADDS_TO_THE_LOSS = ("Distillation", "ZLoss")


def algorithms_of(names: Sequence[str]) -> list[Any]:
    keys = {"input_key": "image", "target_key": "label"} if set(names) & LANGUAGE else {}
    return [make(name, keys, {**ARGUMENTS.get(name, {}), **OF_TEN_STEPS.get(name, {})}) for name in names]


class Shuffled(Sampler[int]):
    """A new order in each iteration, also if the last was not read to its end, where a `RandomSampler` draws again."""

    def __init__(self, data: Any, generator: torch.Generator) -> None:
        self.data, self.generator = data, generator

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(self.data), generator=self.generator).tolist()

    def __len__(self) -> int:
        return len(self.data)


def loader_of(names: Sequence[str], batch_size: int = BATCH) -> DataLoader[Any]:
    """The same batches each time; a worker draws the augmentations, with numbers that follow from the generator."""
    collate = captioned if set(names) & LANGUAGE else None
    generator = torch.Generator().manual_seed(11)
    data = noise(BATCH * LENGTH)
    augments = {"num_workers": 1} if {"AugMix", "RandAugment"} & set(names) else {}
    order = Shuffled(data, generator)
    return DataLoader(data, batch_size=batch_size, sampler=order, generator=generator, collate_fn=collate, **augments)


def model_of(names: Sequence[str]) -> Any:
    return Captioned() if set(names) & LANGUAGE else Classifier()


def precision_of(names: Sequence[str], is_lower: bool) -> Precision:
    return Precision.AMP_BF16 if is_lower or set(names) & LOWER_PRECISION else Precision.FP32


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        warnings.simplefilter("ignore", NotIntendedUseWarning)
        yield


@cache  # the tests of several hosts compare with it
def with_trainer(
    names: tuple[str, ...], is_lower: bool = False, microbatch: int | None = None, float32_outputs: bool = False
) -> dict[str, Any]:
    model = model_of(names)
    if float32_outputs:
        model.register_forward_hook(lambda module, args, outputs: outputs.float())
    trainer = Trainer(
        model=model,
        train_dataloader=loader_of(names),
        max_duration=f"{EPOCHS}ep",
        optimizers=sgd(model),
        algorithms=algorithms_of(names),
        precision=precision_of(names, is_lower),
        device_train_microbatch_size=microbatch,
        progress_bar=False,
        device="cpu",
        seed=SEED,
    )
    trainer.fit()
    weights = clone(trainer.state.model.state_dict())
    trainer.close()
    return weights


def clone(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in weights.items()}


def hosted(names: Sequence[str], is_lower: bool = False, accumulate: int = 1) -> HostedRun:
    model = model_of(names)
    return HostedRun(
        model,
        algorithms_of(names),
        optimizers=sgd(model),
        dataloader=loader_of(names, BATCH // accumulate),
        max_duration=f"{EPOCHS}ep",
        precision=precision_of(names, is_lower),
        accumulate=accumulate,
        seed=SEED,
    )


def train(run: HostedRun) -> dict[str, Any]:
    run.begin_fit()
    while not run.is_over():
        for batch in run.epoch():
            run.backward(run.loss(batch))
            run.step()
        torch.rand(3)  # drawn by other code
    run.end_fit()
    return clone(run.model.state_dict())


@pytest.mark.parametrize("label", CASES)
def test_the_weights_equal_those_of_the_trainer(label: str) -> None:
    names = CASES[label]

    deep_compare(with_trainer(names), train(hosted(names)))


def sampled_but(refused: Iterable[str]) -> list[str]:
    """Return the labels of the sampled cases that a host does not refuse."""
    return [label for label in SAMPLED if label not in refused]


@contextmanager
def refused_when_constructed(host: str, reason: str) -> Iterator[None]:
    """Expect that the constructor of an adapter refuses an algorithm.

    Args:
        host: The module of the adapter.
        reason: A pattern of the message.
    """
    with pytest.raises(ConflictError, match=reason) as caught:
        yield
    assert any(entry.name == "__init__" and Path(entry.path).stem == host for entry in caught.traceback)


def differ(expected: dict[str, Any], actual: dict[str, Any]) -> bool:
    """Return True if weights are not equal bit for bit."""
    return any(not torch.equal(expected[name], actual[name]) for name in expected)


def check_two_batches_per_step(label: str, actual: dict[str, Any]) -> None:
    """Compare the weights of a loop with two batches per step with those of our `Trainer` with two microbatches."""
    expected = with_trainer(CASES[label], microbatch=BATCH // 2)
    if label in PER_BATCH_OF_THE_LOADER:
        assert differ(expected, actual), "remove it from the list"
    else:
        deep_compare(expected, actual)


def check_bfloat16(label: str, actual: dict[str, Any], float32_outputs: bool = False) -> None:
    """Compare the weights of a loop in bfloat16 with those of our `Trainer`.

    Args:
        label: The case.
        actual: The weights.
        float32_outputs: The loop converts outputs to float32.
    """
    names = CASES[label]
    if float32_outputs and label in ADDS_TO_THE_LOSS:
        assert differ(with_trainer(names, is_lower=True), actual), "remove it from the list"
        deep_compare(with_trainer(names, is_lower=True, float32_outputs=True), actual)
    else:
        deep_compare(with_trainer(names, is_lower=True), actual)


@pytest.mark.parametrize("label", [label for label in CASES if label != "BatchSizeWarmup"])
def test_two_batches_per_step_equal_microbatches(label: str) -> None:
    check_two_batches_per_step(label, train(hosted(CASES[label], accumulate=2)))


def test_batches_that_change_are_not_accumulated() -> None:
    with pytest.raises(ConflictError, match=r"`BatchSizeWarmup` changes batch size.*accumulate=1"):
        hosted(["BatchSizeWarmup"], accumulate=2)


@pytest.mark.parametrize("label", CASES)
def test_bfloat16_equals_that_of_the_trainer(label: str) -> None:
    check_bfloat16(label, train(hosted(CASES[label], is_lower=True)))


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_compiled_model_has_the_same_weights(is_wrapped: bool) -> None:
    """Given to the run, or afterwards to `use_model`."""
    torch.compiler.reset()
    names = CASES["MixUp, SAM and LabelSmoothing"]
    model = model_of(names)
    compiled: Any = torch.compile(model.vision, backend="eager")
    run = HostedRun(
        model.vision if is_wrapped else compiled,
        algorithms_of(names),
        loss=model.loss,
        optimizers=sgd(model),
        dataloader=loader_of(names),
        max_duration=f"{EPOCHS}ep",
        seed=SEED,
    )
    if is_wrapped:
        run.use_model(compiled)
    weights = {f"vision.{name.removeprefix('_orig_mod.')}": weight for name, weight in train(run).items()}

    deep_compare(with_trainer(names), weights)


# ---- resumption ----


def resumable(names: Sequence[str]) -> HostedRun:
    """A run whose order of batches follows from the epoch."""
    model = model_of(names)
    data = noise(BATCH * LENGTH)
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=7)
    collate = captioned if set(names) & LANGUAGE else None
    loader: Any = DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=collate)
    return HostedRun(
        model,
        algorithms_of(names),
        optimizers=sgd(model),
        dataloader=loader,
        max_duration=f"{EPOCHS}ep",
        precision=precision_of(names, False),
        seed=SEED,
    )


def save(run: HostedRun) -> bytes:
    file = io.BytesIO()
    with run.saving():
        states = [optimizer.state_dict() for optimizer in run.state.optimizers]
        torch.save({"model": run.model.state_dict(), "run": run.state_dict(), "optimizers": states}, file)
    return file.getvalue()


def resume(names: Sequence[str], content: bytes) -> HostedRun:
    """As a new process would."""
    saved = torch.load(io.BytesIO(content), weights_only=True)
    run = resumable(names)
    run.init()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.model.load_state_dict(saved["model"])
    run.load_state_dict(saved["run"])
    for optimizer, state in zip(run.take_optimizers(), saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return run


@pytest.mark.parametrize("label", [label for label in CASES if label not in ("AugMix", "RandAugment")])
def test_a_run_that_is_killed_in_mid_epoch_ends_like_one_that_is_not(label: str) -> None:
    """Augmentations of the data are drawn by the loader, whose random numbers the run does not know."""
    names = CASES[label]
    run, content = resumable(names), b""
    run.begin_fit()
    while not run.is_over():
        for batch in run.epoch():
            run.backward(run.loss(batch))
            run.step()
            if run.state.timestamp.batch == LENGTH + 2:
                content = save(run)
    run.end_fit()

    torch.manual_seed(99)
    deep_compare(clone(run.model.state_dict()), train(resume(names, content)))
