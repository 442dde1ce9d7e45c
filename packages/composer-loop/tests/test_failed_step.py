"""Tests of what an error of the first step says about the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer.core import State
from composer.loop import HostedRun
from composer.loop.failed_step import describe_failed_step

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])


def text_of(error: Exception) -> str:
    """Return the notes of an error."""
    return "\n".join(getattr(error, "__notes__", []))


def described(batch: Any, net: Any = None, **attributes: Any) -> str:
    state = State(torch.nn.Linear(3, 2) if net is None else net, optimizers=attributes.pop("optimizers", None))
    for name, value in attributes.items():
        setattr(state, name, value)
    error = ValueError("The step failed.")
    describe_failed_step(error, state, batch)
    return text_of(error)


def test_the_batch_the_outputs_and_the_model_are_described() -> None:
    net = torch.nn.Linear(3, 2)
    text = described(
        {"x": X, "labels": Y},
        net,
        outputs=torch.zeros(4, 2),
        optimizers=torch.optim.SGD(net.parameters(), lr=0.5),
    )

    for line in (
        "batch['x']: float32, shape (4, 3), cpu",
        "batch['labels']: int64, shape (4,), cpu, values 0 to 1",
        "outputs: float32, shape (4, 2), cpu",
        "parameters of Linear: 2 float32 on cpu; precision fp32",
        "optimizer: SGD, lr 0.5",
    ):
        assert line in text
    assert "Possible causes" not in text


@pytest.mark.parametrize(
    ("batch", "options", "cause"),
    [
        ((X, Y - 1), {"outputs": torch.zeros(4, 2)}, "The targets are -1 to 0, but the outputs have 2 classes"),
        ((X, Y + 1), {"outputs": {"logits": torch.zeros(4, 2)}}, "The targets are 1 to 2, but the outputs have 2 "),
        ((X, Y.int()), {}, "The targets are int32, but losses of class indices need int64. Use `.long()`."),
        ((X.long(), Y), {}, "The inputs are int64, the parameters float32. Convert the inputs with `.float()`."),
        ((X.double(), Y), {}, "The inputs are float64, the parameters float32. Convert the inputs with"),
        ((X, Y), {"net": torch.nn.Linear(3, 2).half()}, "Keep the parameters in float32 and pass `precision="),
        ((X, Y), {"net": torch.nn.Linear(3, 2, device="meta")}, "The parameter 'weight' is on the meta device"),
        ((X, Y), {"loss": torch.zeros(())}, "nothing in it is trained (2 of 2 parameters require one)"),
    ],
)
def test_likely_causes_are_named(batch: Any, options: dict[str, Any], cause: str) -> None:
    text = described(batch, **options)
    assert 1 == text.partition("Possible causes:\n")[2].strip().count("\n") + 1
    assert cause in text


def test_a_learning_rate_that_is_a_text_is_named() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = "0.1"

    assert "`lr` of SGD is the text '0.1'. Pass a number." in described((X, Y), net, optimizers=optimizer)


def test_ignored_labels_and_token_ids_are_no_causes() -> None:
    tokens = torch.zeros(4, 3, dtype=torch.long)
    labels = torch.full((4, 3), -100)
    net = torch.nn.Sequential(torch.nn.Embedding(2, 2))

    assert "causes" not in described({"input_ids": tokens, "labels": labels}, net, outputs=torch.zeros(4, 3, 2))


def test_a_step_that_cannot_be_described_keeps_its_error() -> None:
    class Hidden(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no parts")

    assert not described(Hidden(x=1))


def hosted(loss: Callable[..., Any], steps: int = 1) -> HostedRun:
    net = torch.nn.Linear(3, 2)
    data = [(X, Y)] * steps
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return HostedRun(net, loss=loss, optimizers=optimizer, dataloader=data, max_duration="1ep")


def train(run: HostedRun) -> None:
    run.begin_fit()
    for batch in run.epoch():
        run.backward(run.loss(batch))
        run.step()


@pytest.mark.parametrize("part", ["loss", "backward"])
def test_a_loop_of_ones_own_gets_the_description_once(part: str) -> None:
    def loss(outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1] + 9) if part == "loss" else F.cross_entropy(outputs, batch[1]).detach()

    with pytest.raises((IndexError, RuntimeError)) as caught:
        train(hosted(loss))
    assert 1 == text_of(caught.value).count("The first step saw:")


def test_only_the_first_step_is_described() -> None:
    calls = iter([0, 9])
    with pytest.raises(IndexError) as caught:
        train(hosted(lambda outputs, batch: F.cross_entropy(outputs, batch[1] + next(calls)), steps=2))
    assert not text_of(caught.value)
