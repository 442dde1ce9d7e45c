from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from composer.loggers import DeferredValue


class Compute:
    """A metric: counts how often it is computed, and keeps changing the tensor it returned, as some metrics do."""

    def __init__(self, value: float) -> None:
        self.calls = 0
        self.tensor = torch.tensor(value)

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_the_tensor_form_reads_as_a_float(dtype: torch.dtype) -> None:
    value = DeferredValue.of_tensor(torch.tensor([2], dtype=dtype))

    assert value.held
    assert value.value == 2.0
    assert type(value.value) is float
    assert type(value.plain) is float


def test_the_tensor_form_lets_go_of_the_tensor_when_it_is_read() -> None:
    tensor = torch.tensor(1.0)
    reference = weakref.ref(tensor)
    value = DeferredValue.of_tensor(tensor)
    value.hold()
    value.expire()
    del tensor

    assert reference() is not None
    assert 1.0 == value.value == float(value)
    assert reference() is None
    assert value.held


def test_the_computed_form_is_computed_when_needed_and_once() -> None:
    compute = Compute(0.5)
    value = DeferredValue(compute)

    assert not value.held
    assert compute.calls == 0
    assert torch.equal(torch.tensor(0.5), value.value)
    assert value.held
    assert 0.5 == float(value) == value.plain
    assert torch.equal(torch.tensor(0.5), value.hold().value)
    assert compute.calls == 1


def test_a_held_value_survives_its_batch() -> None:
    compute = Compute(0.5)
    value = DeferredValue(compute)

    assert value is value.hold()
    value.expire()

    assert torch.equal(torch.tensor(0.5), value.value)


def test_a_value_that_was_not_held_cannot_be_read_after_its_batch() -> None:
    value = DeferredValue(Compute(0.5))
    value.expire()

    assert not value.held
    for read in (lambda: value.value, lambda: value.plain, lambda: float(value), value.hold, lambda: f"{value}"):
        with pytest.raises(
            RuntimeError, match=r"must be held to outlive its batch.*Call its `hold\(\)` in `log_metrics`"
        ):
            read()


@pytest.mark.parametrize("release", [DeferredValue.hold, DeferredValue.expire])
def test_the_batch_is_released(release: Any) -> None:
    compute = Compute(0.5)
    reference = weakref.ref(compute)
    value = DeferredValue(compute)
    release(value)
    del compute

    assert reference() is None


def test_a_held_value_does_not_change_with_the_metric() -> None:
    compute = Compute(0.5)
    value = DeferredValue(compute).hold()
    compute.tensor += 1

    assert float(value) == 0.5


def test_the_computed_form_passes_on_what_is_not_a_single_number() -> None:
    matrix = torch.ones(2, 2)

    assert torch.equal(matrix, DeferredValue(lambda: matrix).plain)
    assert DeferredValue(lambda: {"a": 1}).plain == {"a": 1}
    assert DeferredValue(lambda: torch.tensor(3)).plain == 3
    assert f"{DeferredValue(lambda: torch.tensor(0.5))}" == "0.5"


def test_a_number_can_be_formatted_and_shows_whether_it_was_read() -> None:
    value = DeferredValue.of_tensor(torch.tensor(0.5))
    expired = DeferredValue(Compute(1.0))
    expired.expire()

    assert repr(value) == "DeferredValue(<not read>)"
    assert f"{value:.3f}" == "0.500"
    assert repr(value) == "DeferredValue(0.5)"
    assert repr(expired) == "DeferredValue(<expired>)"


def test_fetch_reads_many_values_exactly() -> None:
    values = [
        DeferredValue.of_tensor(torch.tensor(0.1, dtype=torch.float64)),
        DeferredValue.of_tensor(torch.tensor([0.1])),
        DeferredValue(lambda: torch.tensor(2**53 + 1)),
        DeferredValue(lambda: torch.tensor(True)),
        DeferredValue(lambda: torch.ones(2)),
        DeferredValue(lambda: "text"),
    ]

    DeferredValue.fetch(values)

    assert all(value.ready for value in values)
    assert [0.1, torch.tensor(0.1).item(), 2**53 + 1, True] == [value.plain for value in values[:4]]
    assert torch.equal(torch.ones(2), values[4].plain)
    assert values[5].plain == "text"


def test_a_value_that_was_not_computed_is_not_ready() -> None:
    assert not DeferredValue(Compute(1.0)).ready
    assert DeferredValue(Compute(1.0)).hold().ready
    assert DeferredValue.of_tensor(torch.tensor(1.0)).ready


@pytest.mark.gpu
def test_fetch_does_not_wait_for_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        matrix @ matrix  # warm up
    DeferredValue.fetch([DeferredValue.of_tensor(matrix[0, i]) for i in (0, 1)])  # allocates pinned memory, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            matrix = matrix @ matrix * 1e-4
        values = [DeferredValue.of_tensor(matrix[0, 0]), DeferredValue(lambda: torch.full((), 3.0, device="cuda"))]
        DeferredValue.fetch(values)

        assert not values[0].ready
        expected = [float(value) for value in values]
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert all(value.ready for value in values)
    assert [matrix[0, 0].item(), 3.0] == expected


def test_a_number_on_the_cpu_is_read() -> None:
    value = DeferredValue.of_tensor(torch.tensor(0.5))
    assert value.cpu_number() == 0.5
    assert value.value == 0.5
    assert value.cpu_number() is None  # it has been read, and `value` has it
    assert DeferredValue(lambda: torch.tensor(0.5)).cpu_number() is None
    assert DeferredValue.of_tensor(torch.empty((), device="meta")).cpu_number() is None
