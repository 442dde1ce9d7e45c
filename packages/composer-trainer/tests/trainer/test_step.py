"""Tests of the training step: losses, microbatches and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_runs import Quiet

from composer.core import Callback, DataSpec, State
from composer.core.data_spec import default_split_batch
from composer.loggers import Logger
from composer.loop.loss_terms import LossTerms
from composer.testing import SimpleModel, deep_compare
from composer.trainer import Trainer

MakeTrainer = Any  # the fixture's class, in conftest.py


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_microbatches_equal_one_batch(make_trainer: MakeTrainer, size: int) -> None:
    def train(size: int | None) -> dict[str, Any]:
        model = make_trainer.model().double()
        loader = [(x.double(), y) for x, y in make_trainer.loader()]
        trainer = make_trainer(model=model, train_dataloader=loader, device_train_microbatch_size=size)
        trainer.fit()
        return model.state_dict()

    # float64: sums in another order differ by a few units of 1e-16.
    deep_compare(train(None), train(size), atol=1e-12, rtol=1e-12)


def test_training_equals_a_plain_loop(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    expected = SimpleModel()
    expected.load_state_dict(model.state_dict(), strict=False)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in make_trainer.loader():
            optimizer.zero_grad()
            expected.loss(expected(batch), batch).backward()
            optimizer.step()
    make_trainer(model=model).fit()

    deep_compare(dict(expected.named_parameters()), dict(model.named_parameters()))


class LossOf(SimpleModel):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().loss(outputs, batch)
        half = 0.5 * loss
        return {
            "tensor": loss,
            "rows": loss.expand(4),
            "tuple": (half, half),
            "one": (loss,),
            "dict": {"a": half, "b": half},
            "total": {"total": loss, "shown": 7 * loss},
        }[self.form]


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        ("tensor", {"total"}),
        ("rows", {"total"}),
        ("tuple", {"total", "loss0", "loss1"}),
        ("one", {"total"}),
        ("dict", {"total", "a", "b"}),
        ("total", {"total", "shown"}),
    ],
)
@pytest.mark.parametrize("size", [None, 2])
def test_losses_come_in_several_forms(make_trainer: MakeTrainer, form: str, keys: set[str], size: int | None) -> None:
    plain = make_trainer(model=LossOf("tensor"), device_train_microbatch_size=size)
    other = make_trainer(model=LossOf(form), device_train_microbatch_size=size)
    plain.fit()
    other.fit()

    deep_compare(plain.state.model.state_dict(), other.state.model.state_dict(), atol=1e-6)
    losses = other.state.total_loss_dict
    assert {f"loss/train/{key}" for key in keys} == set(losses)
    assert losses["loss/train/total"] == pytest.approx(plain.state.total_loss_dict["loss/train/total"], rel=1e-5)
    assert all(isinstance(value, float) for value in losses.values())


def test_a_loss_that_is_no_loss_is_refused(make_trainer: MakeTrainer) -> None:
    class Wrong(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return "loss"

    with pytest.raises(
        TypeError, match=r"`loss` must be a tensor, a sequence of tensors or a dict of tensors, got str"
    ):
        make_trainer(model=Wrong()).fit()


def test_microbatches_weigh_by_tokens_if_asked_to(make_trainer: MakeTrainer) -> None:
    class Sum(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return outputs.sum() * 0 + len(batch[0])

    def tokens(batch: Any) -> dict[str, int]:
        return {"total": 100, "loss_generating": 10 ** len(batch[0])}

    spec = DataSpec(make_trainer.loader(3, batch_size=3), get_num_tokens_in_batch=tokens)
    trainer = make_trainer(
        model=Sum(),
        train_dataloader=spec,
        device_train_microbatch_size=2,
        accumulate_train_batch_on_tokens=True,
        max_duration="1ba",
    )
    trainer.fit()

    expected = (2 * 100 + 1 * 10) / 110
    assert trainer.state.total_loss_dict["loss/train/total"] == pytest.approx(expected)


class MaskedRegression(SimpleModel):
    """A mean over the rows that count, so without any of them nan, and so are its gradients."""

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        counts = (batch[1] > 0).float()
        return (outputs.square().sum(dim=1) * counts).sum() / counts.sum()


def count_rows(batch: Any) -> dict[str, int]:
    return {"total": len(batch[1]), "loss_generating": int((batch[1] > 0).sum())}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_has_no_token_that_counts_contributes_nothing(make_trainer: MakeTrainer, size: int, caplog: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    batches = [(torch.randn(4, 1, 1, 1, generator=generator), torch.tensor(mask)) for mask in masks]
    model, expected = MaskedRegression(), MaskedRegression()
    expected.load_state_dict(model.state_dict())
    by_hand, losses = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), []
    for batch in batches:
        by_hand.zero_grad(set_to_none=False)
        if batch[1].any():
            loss = expected.loss(expected(batch), batch)
            loss.backward()
        losses.append(float(loss.detach()) if batch[1].any() else 0.0)
        by_hand.step()
    seen: list[float] = []

    class See(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            seen.append(float(state.total_loss_dict["loss/train/total"]))

    make_trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_dataloader=DataSpec(batches, get_num_tokens_in_batch=count_rows),
        device_train_microbatch_size=size,
        accumulate_train_batch_on_tokens=True,
        max_duration="1ep",
        schedulers=None,
        callbacks=[See()],
    ).fit()

    assert losses == pytest.approx(seen)
    for theirs, ours in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours)
    assert "Batch 2 has no labels that the loss counts" in caplog.text


SEGMENTS = torch.randint(3, (4, 2, 5, 5), generator=torch.Generator().manual_seed(1))
SEGMENTS[:, :1, :4] = 255  # the first microbatch of each batch has fewer pixels, and that of the last batch none
SEGMENTS[3, 0] = 255


def cross_entropy_of_bytes(outputs: torch.Tensor, targets: torch.Tensor, ignore_index: int = 255) -> torch.Tensor:
    return F.cross_entropy(outputs, targets.long(), ignore_index=ignore_index)


def sum_of_squares(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return outputs.square().sum()


IGNORING: dict[str, tuple[Callable[..., torch.Tensor], int, torch.dtype]] = {
    "module": (torch.nn.CrossEntropyLoss(ignore_index=255), 255, torch.int64),
    "class weights": (torch.nn.CrossEntropyLoss(torch.tensor([1.0, 9.0, 2.0]), ignore_index=255), 255, torch.int64),
    "bound argument": (partial(F.cross_entropy, ignore_index=-1), -1, torch.int64),
    "default argument": (F.cross_entropy, -100, torch.int64),
    "bytes": (cross_entropy_of_bytes, 255, torch.uint8),
    "sum": (partial(F.cross_entropy, reduction="sum", ignore_index=255), 255, torch.int64),
    "sum of squares": (sum_of_squares, 255, torch.int64),
    "mean over all": (torch.nn.CrossEntropyLoss(ignore_index=255, reduction="none"), 255, torch.int64),
}


def trained_on_segments(case: str, size: int, **options: Any) -> dict[str, Any]:
    loss, ignored, dtype = IGNORING[case]
    generator = torch.Generator().manual_seed(0)
    segments = SEGMENTS.where(SEGMENTS != 255, ignored).to(dtype)
    batches = [(torch.randn(2, 3, 5, 5, generator=generator), targets) for targets in segments]
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 3, 1)
    trainer = Trainer(
        model=net,
        loss=loss,
        train_dataloader=batches,
        optimizers=torch.optim.SGD(net.parameters(), lr=0.01),
        device_train_microbatch_size=size,
        max_duration="1ep",
        progress_bar=False,
        **options,
    )
    trainer.fit()
    return {**net.state_dict(), **trainer.state.total_loss_dict}


@pytest.mark.parametrize("on_tokens", [False, True])
@pytest.mark.parametrize("case", IGNORING)
def test_microbatches_weigh_by_the_terms_of_their_loss(case: str, on_tokens: bool) -> None:
    parts = trained_on_segments(case, 1, accumulate_train_batch_on_tokens=on_tokens)
    deep_compare(trained_on_segments(case, 2), parts, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", ["module", "class weights"])
def test_counts_of_labels_on_an_accelerator_stay_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, count = trained_on_segments(case, 2), LossTerms.count
    monkeypatch.setattr(LossTerms, "count", lambda terms, batch: torch.as_tensor(count(terms, batch)))
    deep_compare(expected, trained_on_segments(case, 1), atol=1e-6, rtol=1e-6)

    terms = LossTerms(torch.nn.Module(), DataSpec([]))
    terms._ignored = 255
    assert "meta" == count(terms, (None, SEGMENTS[0].to("meta"))).device.type  # reading its number would raise


def test_a_loss_that_does_not_say_what_it_ignores_is_reported_once() -> None:
    targets = torch.tensor([[0, 1], [-100, 1], [1, 0], [-100, -100]])
    inputs = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))

    def trained(size: int) -> dict[str, Any]:
        torch.manual_seed(0)
        net = torch.nn.Conv1d(3, 2, 1)
        Trainer(
            model=net,
            loss=lambda outputs, targets: F.cross_entropy(outputs, targets.long()),
            train_dataloader=[(inputs, targets)] * 2,
            optimizers=torch.optim.SGD(net.parameters(), lr=0.1),
            device_train_microbatch_size=size,
            progress_bar=False,
            max_duration="1ep",
        ).fit()
        return net.state_dict()

    with pytest.warns(UserWarning, match="Give the loss an attribute `ignore_index`") as caught:
        parts = trained(2)

    assert 1 == len(caught)
    deep_compare(trained(4), parts, atol=1e-6, rtol=1e-6)


def test_a_method_of_the_user_may_divide_what_its_loss_function_returns() -> None:
    class Dividing(SimpleModel):
        def __init__(self) -> None:
            super().__init__()
            self.loss_fn = torch.nn.CrossEntropyLoss(reduction="sum")

        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return self.loss_fn(outputs, batch[1]) / len(batch[1])

    assert not LossTerms(Dividing(), DataSpec([])).is_sum


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_that_nobody_counts_cannot_weigh(make_trainer: MakeTrainer, size: int) -> None:
    trainer = make_trainer(
        train_dataloader=[(x, y.float()) for x, y in make_trainer.loader(4, batch_size=4)],
        device_train_microbatch_size=size,
        accumulate_train_batch_on_tokens=True,
        max_duration="1ba",
    )

    with pytest.raises(ValueError, match="needs the number of tokens, but the batch has no class indices as labels"):
        trainer.fit()


def test_transforms_see_host_batches_and_device_microbatches(make_trainer: MakeTrainer) -> None:
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[Any], Any]:
        def transform(batch: Any) -> Any:
            seen.append((name, len(batch[0])))
            return batch

        return transform

    spec = DataSpec(make_trainer.loader(), batch_transforms=note("batch"), microbatch_transforms=note("microbatch"))
    make_trainer(train_dataloader=spec, device_train_microbatch_size=2, max_duration="1ba").fit()

    assert [("batch", 4), ("microbatch", 2), ("microbatch", 2)] == seen


def test_gradients_are_cleared_after_fit(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.fit()

    assert {None} == {parameter.grad for parameter in trainer.state.model.parameters()}


def test_a_step_reads_nothing_from_tensors(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(RuntimeError):
        pass

    class Guard(Callback):
        def epoch_start(self, state: State, logger: Logger) -> None:
            for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "cpu", "__index__"):
                monkeypatch.setattr(torch.Tensor, name, forbidden(name))

        def epoch_end(self, state: State, logger: Logger) -> None:
            monkeypatch.undo()

    def forbidden(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise Reading(f"a training step called Tensor.{name}")

        return read

    make_trainer(
        train_dataloader=list(make_trainer.loader()), callbacks=Guard(), loggers=Quiet(), max_duration="1ep"
    ).fit()


def test_microbatches_may_come_from_a_generator_but_must_come(make_trainer: MakeTrainer) -> None:
    def spec(split: Callable[[Any, float], Any]) -> DataSpec:
        return DataSpec(list(make_trainer.loader()), split_batch=split)

    def halves(batch: Any, size: float) -> Any:
        yield from default_split_batch(batch, size)

    expected = make_trainer(device_train_microbatch_size=2, max_duration="2ba")
    expected.fit()
    trainer = make_trainer(train_dataloader=spec(halves), device_train_microbatch_size=2, max_duration="2ba")
    trainer.fit()
    weights = [trainer.state.model.state_dict(), expected.state.model.state_dict()]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    nothing = make_trainer(train_dataloader=spec(lambda batch, size: []), device_train_microbatch_size=2)
    with pytest.raises(ValueError, match=r"`split_batch` must return at least one microbatch, got none"):
        nothing.fit()


def test_transforms_of_microbatches_may_be_set_during_a_run(make_trainer: MakeTrainer) -> None:
    class Set(Callback):
        def epoch_start(self, state: State, logger: Logger) -> None:
            spec.microbatch_transforms = lambda batch: seen.append(batch) or batch

    seen: list[Any] = []
    spec = DataSpec(list(make_trainer.loader()))
    make_trainer(train_dataloader=spec, max_duration="2ba", callbacks=Set()).fit()

    assert 2 == len(seen)
