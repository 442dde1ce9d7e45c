"""The queue behind the loggers of tracking services."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from composer.loggers import DeferredValue
from composer.loggers._sender import Logged, Sender, hold_metrics, start_copy


class Service:
    """Keeps what it is sent, and can be slow, as it is with a gate that is closed."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.calls = 0
        self.threads: set[threading.Thread] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def send(self, records: Sequence[Logged]) -> None:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(30)
        self.threads.add(threading.current_thread())
        self.received += [(record.step, record.metrics) for record in records]

    def note(self, what: Any) -> Callable[[], None]:
        return lambda: self.received.append(what)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.gate.set()


def fail(_: Any = None) -> None:
    raise OSError("no route to host")


def test_everything_is_sent_in_order_from_a_thread(service: Service) -> None:
    sender = Sender("Test", service.send)
    sender.put(service.note("first"))
    for step in range(5000):
        sender.put_metrics({"loss": step / 2}, step)
        if step == 2500:
            sender.put(service.note("middle"))

    assert sender.flush()
    sender.put(service.note("last"))
    sender.close()

    expected: list[Any] = [(step, {"loss": step / 2}) for step in range(5000)]
    expected.insert(2501, "middle")
    assert ["first", *expected, "last"] == service.received
    assert threading.current_thread() not in service.threads
    assert len(service.threads) == 1
    assert service.calls < 100  # metrics are sent many at a time
    assert sender.pending == 0


def test_it_is_sent_without_a_flush(service: Service) -> None:
    sender = Sender("Test", service.send, interval=0.01)
    sender.put_metrics({"a": 1}, 0)

    assert service.entered.wait(30)
    sender.close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (True, True),
        (0.5, 0.5),
        (None, None),
        ("text", "text"),
        (torch.tensor(3), 3),
        (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        (torch.tensor(float("inf")), float("inf")),
        (np.float32(0.25), 0.25),
        (np.int64(7), 7),
        ({"nested": [1]}, {"nested": [1]}),
        (DeferredValue.of_tensor(torch.tensor([2])), 2.0),
        (DeferredValue(lambda: torch.tensor(0.75, dtype=torch.bfloat16)), 0.75),
        (DeferredValue(lambda: "text"), "text"),
    ],
)
def test_values_arrive_as_plain_ones(service: Service, value: Any, expected: Any) -> None:
    sender = Sender("Test", service.send)
    sender.put_metrics({"key": value}, 3)
    sender.close()

    [(step, metrics)] = service.received
    assert step == 3
    assert expected == metrics["key"]
    assert type(expected) is type(metrics["key"])


def test_values_are_snapshots(service: Service) -> None:
    tensor, array, nested = torch.zeros(2), np.zeros(2), {"a": [1]}
    sender = Sender("Test", service.send)
    sender.put_metrics({"tensor": tensor, "array": array, "nested": nested, "held": DeferredValue(lambda: tensor)}, 0)
    tensor += 1
    array += 1
    nested["a"].append(2)
    sender.close()

    metrics = service.received[0][1]
    assert metrics["tensor"].tolist() == metrics["array"].tolist() == metrics["held"].tolist() == [0, 0]
    assert metrics["nested"] == {"a": [1]}


def test_values_still_on_the_device_keep_the_order(service: Service) -> None:
    """A device that is "not the CPU" without having one: its values are not ready until they are fetched."""
    sender = Sender("Test", service.send, interval=0.01)
    sender._fetch_due = float("inf")
    sender.put_metrics({"a": Late(1.5)}, 0)
    sender.put_metrics({"a": 2}, 1)
    sender.put(service.note("call"))
    assert not service.entered.wait(0.05)  # the second must not overtake the first

    sender.close()
    assert [(0, {"a": 1.5}), (1, {"a": 2}), "call"] == service.received


class Late(torch.Tensor):
    """Says it is on another device."""

    @staticmethod
    def __new__(cls, value: float) -> Late:
        return torch.Tensor._make_subclass(cls, torch.tensor(value))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    def detach(self) -> Late:
        return self

    def clone(self, **_: Any) -> Late:  # type: ignore[override]
        return self


def test_the_step_is_not_kept_waiting_by_a_dead_service(service: Service) -> None:
    service.gate.clear()
    sender = Sender("Test", service.send, interval=0.01, capacity=8, timeout=0.05)
    sender.put_metrics({"a": 0}, 0)
    assert service.entered.wait(30)
    for step in range(1, 8):
        sender.put_metrics({"a": step}, step)
    with pytest.warns(UserWarning, match="`Test` does not get rid of what is logged: its queue is full"):
        sender.put_metrics({"a": 8}, 8)
    sender.put_metrics({"a": 9}, 9)  # warned once
    sender.put(service.note("image"), size=100, may_drop=True)
    sender.put(service.note("a file"))

    assert not sender.flush()
    assert sender.pending == 9
    service.gate.set()
    sender._deadline.timeout = 30
    sender.put(service.note("end"))
    sender.close()
    assert [*((step, {"a": step}) for step in range(8)), "a file", "end"] == service.received


@pytest.mark.parametrize("array", [np.zeros(2048), torch.zeros(2048), DeferredValue(lambda: torch.zeros(2048))])
def test_arrays_fill_the_queue_by_their_size(service: Service, array: Any) -> None:
    sender = Sender("Test", service.send, capacity=8)
    with pytest.warns(UserWarning, match="its queue is full"):
        sender.put_metrics({"matrix": array}, 0)
    sender.close()

    assert service.received == []


def test_a_device_that_fails_costs_only_what_was_on_it(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be copied from the device "meta", as from a GPU after an illegal access."""
    sender = Sender("Test", service.send)
    sender.put_metrics({"a": 0}, 0)
    sender.put_metrics({"a": DeferredValue.of_tensor(torch.zeros((), device="meta"))}, 1)
    sender.put_metrics({"a": torch.zeros(3, device="meta")}, 2)
    sender.put_metrics({"a": 3}, 3)
    with pytest.warns(UserWarning, match="`Test` failed to log: NotImplementedError"):
        sender.flush()
    with caplog.at_level(logging.WARNING):
        sender.close()

    assert [(0, {"a": 0}), (3, {"a": 3})] == service.received
    assert "`Test` did not deliver 2 of 4 records." in caplog.text


def test_a_service_that_stays_dead_is_given_up(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.gate.clear()
    sender = Sender("Test", service.send, timeout=0.05)
    sender.put_metrics({"a": 0}, 0)
    with caplog.at_level(logging.WARNING):
        sender.close()

    assert "`Test` could not send everything in 0.05 seconds: 1 records wait." in caplog.text
    assert "`Test` did not deliver 1 of 1 records." in caplog.text


def test_a_failure_is_a_warning_once_and_the_rest_is_sent(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender("Test", service.send)
    sender.put(fail)
    sender.put_metrics({"a": 1}, 0)
    sender.put(fail)
    with pytest.warns(UserWarning, match="`Test` failed to log: OSError: no route to host The run goes on"):
        sender.flush()
    sender.put_metrics({"a": 2}, 1)
    with caplog.at_level(logging.WARNING):
        sender.close()

    assert [(0, {"a": 1}), (1, {"a": 2})] == service.received
    assert "`Test` did not deliver 2 of 4 records." in caplog.text


@pytest.mark.parametrize("how", ["put", "put_metrics", "flush", "check", "close"])
def test_a_failure_is_an_error_if_so_wanted(how: str) -> None:
    sender = Sender("Test", fail, on_error="raise")
    sender.put_metrics({"a": 1}, 0)
    sender.flush(check=False)
    arguments = {"put": (print,), "put_metrics": ({"a": 2}, 1)}.get(how, ())

    with pytest.raises(RuntimeError, match="`Test` failed to log: OSError: no route to host") as caught:
        getattr(sender, how)(*arguments)
    assert isinstance(caught.value.__cause__, OSError)
    sender.close()  # not raised a second time


def test_nothing_can_be_logged_after_the_end(service: Service) -> None:
    sender = Sender("Test", service.send)
    sender.close()
    sender.close()

    with pytest.raises(RuntimeError, match="`Test` cannot log any more: it is closed"):
        sender.put_metrics({"a": 1}, 0)
    with pytest.raises(RuntimeError, match="`Test` cannot log any more"):
        sender.put(print)
    assert sender.flush()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_sends_nothing(service: Service) -> None:
    sender = Sender("Test", service.send)
    sender.put_metrics({"a": 1}, 0)
    sender.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="belongs to the process this one was forked from"):
                sender.put(print)
            assert sender.forked
            assert not sender.flush()
            sender.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    sender.put_metrics({"a": 2}, 1)
    sender.close()
    assert service.received == [(0, {"a": 1}), (1, {"a": 2})]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "ignore"}, "`on_error` must be 'warn' or 'raise', got 'ignore'"),
        ({"interval": 0}, "`interval` must be positive, got 0"),
        ({"capacity": 0}, "`capacity` must be positive, got 0"),
        ({"timeout": -1}, "`timeout` must be positive, got -1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sender("Test", print, **arguments)


def test_closing_from_its_own_thread_does_not_wait_for_itself(service: Service) -> None:
    sender = Sender("Test", service.send, timeout=20)
    sender.put(sender.close)
    sender.put_metrics({"a": 1}, 0)
    sender.flush()

    assert [(0, {"a": 1})] == service.received


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.ones(2, 3), np.float32),
        (torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True), np.float32),
        (torch.ones(2, 3, dtype=torch.float16), np.float32),
        (torch.ones(2, 3, dtype=torch.uint8), np.uint8),
        (np.ones((2, 3)), np.float64),
    ],
)
def test_a_copy_of_an_array_is_a_snapshot(value: Any, dtype: Any) -> None:
    read = start_copy(value)
    with torch.no_grad():
        value *= 5

    assert dtype == read().dtype
    assert np.array_equal(np.ones((2, 3)), read())


def test_ranks_that_do_not_log_take_part_in_computing() -> None:
    computed = []
    value = DeferredValue(lambda: computed.append(1) or torch.tensor(1.0))
    hold_metrics({"a": value, "b": 2})

    assert computed == [1]


@pytest.mark.parametrize("crash", ["pass", "raise ValueError('a crash')"])
def test_what_waits_is_sent_when_the_process_ends(crash: str) -> None:
    code = f"""
import sys, atexit
from composer.loggers._sender import Sender
client = []
atexit.register(client.append, "closed")   # as clients do
def send(records):
    print([(r.step, r.metrics) for r in records], client, flush=True)
sender = Sender("Test", send, interval=3600)
sender.put_metrics({{"a": 1}}, 0)
sender.put(lambda: print("call", flush=True))
{crash}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert "[(0, {'a': 1})] []\ncall\n" == run.stdout
    assert ("ValueError: a crash" in run.stderr) == (crash != "pass")


def test_a_sender_that_nobody_needs_goes_away(service: Service) -> None:
    import weakref

    sender = Sender("Test", service.send)
    sender.put_metrics({"a": 1}, 0)
    sender.close()
    reference = weakref.ref(sender)
    del sender
    gc.collect()

    assert reference() is None


@pytest.mark.gpu
def test_values_on_a_gpu_are_copied_without_waiting(service: Service) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sender = Sender("Test", service.send)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(200):
            value = torch.full((), float(step), device="cuda", dtype=torch.bfloat16 if step % 2 else torch.float32)
            vector = torch.arange(3, device="cuda")
            image = start_copy(vector.bfloat16())
            metric = DeferredValue(lambda value=value: value + 1)
            sender.put_metrics({"raw": value, "loss": DeferredValue.of_tensor(value), "m": metric, "v": vector}, step)
            metric.expire()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sender.close()

    assert [0, 1, 2] == image().tolist()
    assert 200 == len(service.received)
    for step, metrics in service.received:
        wanted = torch.tensor(float(step), dtype=torch.bfloat16 if step % 2 else torch.float32)
        assert wanted.item() == metrics["raw"] == metrics["loss"]
        assert (wanted + 1).item() == metrics["m"]
        assert [0, 1, 2] == metrics["v"].tolist()
