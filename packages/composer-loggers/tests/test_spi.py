"""The interface for loggers of services: the sender, and what helps with values, images, files and failures."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from composer.loggers import DeferredValue
from composer.loggers.spi import (
    HeldFiles,
    Logged,
    Sender,
    _in_unit_range,
    call_in_time,
    check_delivery_options,
    hold_metrics,
    import_client,
    list_images,
    read_arrays,
    read_numbers,
    start_copy,
    table_cell,
)


class Service:
    """Stores the records it receives; while its gate is closed it hangs."""

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
    with pytest.warns(UserWarning, match="`Test` cannot send as fast as the run logs: its queue is full"):
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

    def log() -> None:  # whichever call comes after the failure warns
        sender.put_metrics({"a": 0}, 0)
        sender.put_metrics({"a": DeferredValue.of_tensor(torch.zeros((), device="meta"))}, 1)
        sender.put_metrics({"a": torch.zeros(3, device="meta")}, 2)
        sender.put_metrics({"a": 3}, 3)
        sender.flush()

    with pytest.warns(UserWarning, match="`Test` failed to log: NotImplementedError"):
        log()
    with caplog.at_level(logging.WARNING):
        sender.close()

    assert [(0, {"a": 0}), (3, {"a": 3})] == service.received
    assert "`Test` did not deliver 2 of 4 records." in caplog.text


def test_a_service_that_stays_unreachable_is_given_up(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.gate.clear()
    sender = Sender("Test", service.send, timeout=0.05)
    sender.put_metrics({"a": 0}, 0)
    with caplog.at_level(logging.WARNING):
        sender.close()

    assert "`Test` could not send everything in 0.05 seconds: 1 records wait." in caplog.text
    assert "`Test` did not deliver 1 of 1 records." in caplog.text


@pytest.mark.parametrize("sends", [True, False])
def test_records_that_are_only_collected_do_not_show_that_the_service_works(sends: bool) -> None:
    sender = Sender("Test", lambda records: sends, timeout=60)
    sender.put(fail, check=False)
    sender.flush(check=False)
    left = sender.seconds_left
    sender.put(lambda: sends, check=False)
    sender.flush(check=False)

    assert sends == (sender.seconds_left > left)
    with pytest.warns(UserWarning, match="failed to log"):
        sender.close()


def test_a_failure_is_a_warning_once_and_the_rest_is_sent(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender("Test", service.send)

    def log() -> None:  # whichever call comes after the failure warns
        sender.put(fail)
        sender.put_metrics({"a": 1}, 0)
        sender.put(fail)
        sender.flush()

    with pytest.warns(UserWarning, match="`Test` failed to log: OSError: no route to host The run continues") as warned:
        log()
    assert len(warned) == 1
    sender.put_metrics({"a": 2}, 1)
    with caplog.at_level(logging.WARNING):
        sender.close()

    assert [(0, {"a": 1}), (1, {"a": 2})] == service.received
    assert "`Test` did not deliver 2 of 4 records." in caplog.text


@pytest.mark.parametrize("how", ["put", "put_metrics", "flush", "check", "close"])
def test_a_failure_is_an_error_with_on_error_raise(how: str) -> None:
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
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
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


def test_ranks_that_do_not_log_compute_metrics_too() -> None:
    computed = []
    value = DeferredValue(lambda: computed.append(1) or torch.tensor(1.0))
    hold_metrics({"a": value, "b": 2})

    assert computed == [1]


@pytest.mark.parametrize("crash", ["pass", "raise ValueError('a crash')"])
def test_pending_records_are_sent_when_the_process_ends(crash: str) -> None:
    code = f"""
import sys, atexit
from composer.loggers.spi import Sender
client = []
atexit.register(client.append, "closed")   # as clients do
def send(records):
    print([(r.step, r.metrics) for r in records], client, flush=True)
sender = Sender("Test", send, interval=3600)
sender.put_metrics({{"a": 1}}, 0)
sender.put(lambda: print("call", flush=True))
{crash}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)

    assert "[(0, {'a': 1})] []\ncall\n" == run.stdout
    assert ("ValueError: a crash" in run.stderr) == (crash != "pass")


def test_a_closed_sender_is_collected(service: Service) -> None:
    import weakref

    sender = Sender("Test", service.send)
    sender.put_metrics({"a": 1}, 0)
    sender.close()
    reference = weakref.ref(sender)
    del sender
    gc.collect()

    assert reference() is None


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.array([2.5]), 2.5),
        (np.array(7), 7.0),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (None, None),
        ("3", None),
        (1j, None),
        (np.zeros(2), None),
    ],
)
def test_only_single_numbers_are_read(value: Any, number: float | None) -> None:
    assert ({} if number is None else {"a": number}) == read_numbers({"a": value})


def test_the_last_array_of_each_name_is_read(caplog: pytest.LogCaptureFixture) -> None:
    half = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    first = {"confusion": torch.zeros(2, 2), "loss": 0.5, "one": torch.ones(1), "curve": (half, [np.ones(3), 7])}
    last = {"confusion": torch.eye(2), "big": np.zeros(1 << 21), "text": np.array(["a", "b"]), "named": {"a": 1.0}}
    records = [Logged(first, 1, 0.0), Logged(last, 2, 0.0)]

    found = {name: (step, array.tolist()) for name, (step, array) in read_arrays(records).items()}
    expected = {"confusion": (2, [[1, 0], [0, 1]]), "curve/0": (1, [0.5, 0.25]), "curve/1/0": (1, [1, 1, 1])}
    assert expected == found
    assert "The array big, of shape (2097152,), is too large to be logged." in caplog.text
    assert {"named/a": 1.0} == read_numbers(last)


def test_numbers_of_a_snapshot_are_read(service: Service) -> None:
    sender = Sender("Test", service.send)
    metrics = sender.put_metrics({"loss": DeferredValue.of_tensor(torch.tensor(0.5)), "text": "a", "n": 2}, 0)

    assert {"loss": 0.5, "n": 2.0} == read_numbers(metrics)
    sender.close()


@pytest.mark.filterwarnings("error")
def test_queued_images_are_snapshots_in_the_unit_range(service: Service) -> None:
    sender = Sender("Test", service.send)
    image = torch.tensor([-2.0, 0.0, 2.0])
    sender.put_images([image, np.array([300, 1])], lambda copies: service.received.extend(read() for read in copies))
    image.zero_()
    sender.close()

    assert [[0.0, 0.5, 1.0], [255, 1]] == [array.tolist() for array in service.received]
    assert np.uint8 == service.received[1].dtype


def test_images_may_be_dropped_when_the_queue_is_full(service: Service) -> None:
    sender = Sender("Test", service.send, capacity=8)
    with pytest.warns(UserWarning, match="its queue is full"):
        sender.put_images([torch.zeros(3, 64, 64)], service.received.append)
    sender.close()

    assert service.received == []
    assert sender.num_dropped == 1


def test_images_are_listed_and_checked() -> None:
    image = torch.zeros(3, 2, 2)
    assert [image] == list_images(image)
    assert list_images([image, image]) == [image, image]
    with pytest.raises(ValueError, match=r"`images` must have 2 to 4 dimensions, got shape \(3,\)"):
        list_images([torch.zeros(3)])


@given(nps.arrays(np.float32, nps.array_shapes(max_dims=3), elements=st.floats(width=32)))
def test_a_scaled_image_is_finite_and_in_the_unit_range(image: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        scaled = _in_unit_range(image)
    assert scaled.shape == image.shape
    assert 0 <= scaled.min() <= scaled.max() <= 1


def test_images_beyond_the_unit_range_are_scaled() -> None:
    inside = np.array([[0.25, 0.5]])
    assert np.array_equal(_in_unit_range(inside), inside)
    assert _in_unit_range(np.array([-2.0, 0.0, 2.0])).tolist() == [0.0, 0.5, 1.0]
    assert _in_unit_range(np.array([7.0, 7.0])).tolist() == [0.0, 0.0]
    assert _in_unit_range(np.array([-1.0, np.nan, np.inf, -np.inf, 1.0])).tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
def test_images_of_bytes_and_booleans_are_not_changed(dtype: Any) -> None:
    image = np.array([[0, 1]], dtype=dtype)
    assert _in_unit_range(image) is image


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint16])
def test_images_of_integers_become_bytes(dtype: Any) -> None:
    scaled = _in_unit_range(np.array([[0, 1, 255, 300]], dtype=dtype))
    assert scaled.dtype == np.uint8
    assert scaled.tolist() == [[0, 1, 255, 255]]


def test_a_cell_of_a_table_is_a_number_text_or_none() -> None:
    cells = [1, 0.5, "a", None, torch.tensor(2.0), [1, 2]]
    assert [table_cell(cell) for cell in cells] == [1, 0.5, "a", None, "2.0000", "[1, 2]"]


@pytest.mark.parametrize("links", [True, False])
def test_a_held_file_outlives_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def no_links(*_: Any) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "rank0.pt"
    path.write_bytes(b"weights")
    files = HeldFiles()
    held = files.hold(path, "other.pt")
    path.unlink()
    assert held.name == "other.pt"
    assert held.read_bytes() == b"weights"
    assert files.describe("Metrics are lost.") == f"Metrics are lost. The files to be sent are kept: {held}."
    files.release(held)
    assert files.describe("Metrics are lost.") == "Metrics are lost."
    assert list(tmp_path.iterdir()) == []
    files.release(held)


def test_the_target_of_a_link_is_held(tmp_path: Path) -> None:
    (tmp_path / "ep1.pt").write_bytes(b"weights")
    (tmp_path / "latest.pt").symlink_to("ep1.pt")
    held = HeldFiles().hold(tmp_path / "latest.pt", "latest.pt")
    assert held.read_bytes() == b"weights"
    HeldFiles.release(held)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ep1.pt", "latest.pt"]


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan])
def test_an_invalid_delivery_timeout_is_refused(timeout: float) -> None:
    check_delivery_options("raise", None)
    check_delivery_options("warn", 1.5)
    with pytest.raises(ValueError, match="`delivery_timeout` must be positive"):
        check_delivery_options("warn", timeout)


def test_a_call_returns_raises_or_times_out() -> None:
    gate = threading.Event()
    assert call_in_time(lambda: 3, 30, "Counting") == 3
    with pytest.raises(OSError, match="no route to host"):
        call_in_time(fail, 30, "Connecting")
    with pytest.raises(
        TimeoutError, match=r"Opening a run has not ended in 0\.01 seconds\. Check that the service runs"
    ):
        call_in_time(lambda: gate.wait(30), 0.01, "Opening a run")
    gate.set()


def test_the_documented_logger_works() -> None:
    import composer.loggers.spi
    from composer.core import Engine, State

    example = textwrap.dedent(composer.loggers.spi.__doc__.partition("::\n")[2])  # type: ignore[union-attr]
    logger = example.partition("trainer = ")[0].replace("from composer import Trainer\n", "")  # of another package
    namespace: dict[str, Any] = {}
    exec(logger, namespace)  # noqa: S102 - our own docstring
    logged: list[Any] = []

    class Client:
        def log(self, numbers: dict[str, float], step: int, time: float) -> None:
            assert time > 0
            logged.append((numbers, step))

    state = State(torch.nn.Linear(1, 1), max_duration="1ep", callbacks=[namespace["MyLogger"](Client())])
    engine = Engine(state)
    engine.run_event("init")
    engine.logger.log_metrics({"loss": DeferredValue.of_tensor(torch.tensor(0.5)), "note": "text"})
    engine.close()

    assert logged == [({"loss": 0.5}, 0)]


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


def test_a_woken_thread_sends_before_its_interval_and_nobody_waits() -> None:
    sent = threading.Event()
    sender = Sender("Logger", lambda records: sent.set(), interval=3600)
    sender.put_metrics({"a": 1}, 0)
    sender.wake()

    assert sent.wait(30)
    sender.close()


def test_a_flush_does_not_wait_for_the_interval(service: Service) -> None:
    sender = Sender("Test", service.send, interval=600)
    sender.put_metrics({"a": 1}, 0)
    assert sender.flush()
    sender.put_metrics({"a": 2}, 1)
    time.sleep(0.2)  # its thread waits for the interval now

    assert sender.flush()
    assert [(0, {"a": 1}), (1, {"a": 2})] == service.received
    sender.close()


def test_a_client_is_imported_or_named() -> None:
    assert math is import_client("math", "MyLogger")
    with pytest.raises(ModuleNotFoundError, match="`MyLogger` needs `no_such_client`, which is not"):
        import_client("no_such_client", "MyLogger")
