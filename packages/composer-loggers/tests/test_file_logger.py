from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.core import State
from composer.loggers import DeferredValue, LoggerDestination
from composer.loggers._capture import Capture, LineAssembler
from composer.loggers.file_logger import FileLogger

LOG = Path("my-run/logs-rank0.txt")


@pytest.fixture(autouse=True)
def own_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """Streams of the test's own, so that nothing of pytest's is captured."""


class Uploads(LoggerDestination):
    """Keeps the content of every uploaded file."""

    def __init__(self) -> None:
        self.files: list[tuple[str, str, bool]] = []

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.files.append((remote_file_name, file_path.read_text(), overwrite))

    def can_upload_files(self) -> bool:
        return True


def lines() -> list[str]:
    return LOG.read_text().splitlines(keepends=True)


# ---- what is written ----


def test_each_kind_of_data_has_its_line(start: Any) -> None:
    run = start(FileLogger())
    run.logger.log_hyperparameters({"foo": 3})
    run.logger.log_metrics({"loss": 2}, step=1)
    run.logger.log_metrics({"loss": DeferredValue.of_tensor(torch.tensor(0.5)), "b": torch.tensor([2])}, step=2)
    run.logger.log_traces({"algorithm_traces/MixUp/Event.INIT": 1})
    run.logger.log_table(["a", "b"], [[1, "x"]], name="table")
    run.close()

    assert [
        "[hyperparameter]: foo: 3 \n",
        "[metric][batch=1]: loss: 2 \n",
        "[metric][batch=2]: loss: 0.5000 \n",
        "[metric][batch=2]: b: 2 \n",
        "[trace]: algorithm_traces/MixUp/Event.INIT:1\n",
        '[table]: table: {"columns":["a","b"],"data":[[1,"x"]]}\n',
    ] == lines()


def test_a_run_is_written_in_order(start: Any) -> None:
    run = start(FileLogger(), "2ba", 2)
    run.fit()
    run.close()

    assert [
        "[metric][batch=0]: time/epoch: 0 \n",
        *[f"[metric][batch=0]: time/{key}: 0 \n" for key in ("batch", "sample", "batch_in_epoch", "sample_in_epoch")],
        "[metric][batch=0]: trainer/device_train_microbatch_size: 2 \n",
        "[metric][batch=0]: loss/train/total: 1.0000 \n",
        "[metric][batch=0]: metrics/train/accuracy: 0.0100 \n",
    ] == lines()[:8]
    assert "[metric][batch=1]: metrics/train/accuracy: 0.0200 \n" in lines()


def test_output_is_captured_from_construction_on_and_in_order(start: Any) -> None:
    logger = FileLogger()
    print("Hello, stdout!\nExtra Line")
    print("Hello, stderr!\nExtra Line2", file=sys.stderr)
    run = start(logger)
    print("Hello, stdout!\nExtra Line3")
    run.logger.log_metrics({"a": 1})
    print("Hello, stderr!\nExtra Line4", file=sys.stderr)
    run.close()

    assert [
        "[stdout]: Hello, stdout!\n",
        "[stdout]: Extra Line\n",
        "[stderr]: Hello, stderr!\n",
        "[stderr]: Extra Line2\n",
        "[stdout]: Hello, stdout!\n",
        "[stdout]: Extra Line3\n",
        "[metric][batch=0]: a: 1 \n",
        "[stderr]: Hello, stderr!\n",
        "[stderr]: Extra Line4\n",
    ] == lines()
    assert "Hello, stdout!\nExtra Line\nHello, stdout!\nExtra Line3\n" == sys.stdout.getvalue()  # type: ignore[attr-defined]


def test_the_prefix_stands_at_the_start_of_a_line_only(start: Any) -> None:
    run = start(FileLogger())
    print("one", end=" ")
    print("line", end="")
    run.logger.log_metrics({"a": 1})
    print()
    print("\nunfinished", end="")
    run.close()

    assert ["[metric][batch=0]: a: 1 \n", "[stdout]: one line\n", "[stdout]: \n", "[stdout]: unfinished\n"] == lines()


def test_an_exception_reported_through_the_hook_is_on_the_disk_at_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    start(FileLogger())
    error = RuntimeError("My Exception!")

    sys.excepthook(RuntimeError, error, error.__traceback__)

    assert "[stderr]: RuntimeError: My Exception!\n" == lines()[-1]


def test_everything_is_put_back_at_the_end(start: Any) -> None:
    before = (sys.stdout, sys.stderr, sys.excepthook)
    run = start([FileLogger(), ])
    run.close()
    print("after")
    print("after", file=sys.stderr)

    assert before == (sys.stdout, sys.stderr, sys.excepthook)
    assert "write" not in vars(sys.stdout)
    assert [] == lines()


@pytest.mark.parametrize("wanted", ["stdout", "stderr"])
def test_either_stream_can_be_left_alone(start: Any, wanted: str) -> None:
    run = start(FileLogger(capture_stdout=wanted == "stdout", capture_stderr=wanted == "stderr"))
    print("text")
    print("text", file=sys.stderr)
    run.close()

    assert [f"[{wanted}]: text\n"] == lines()


def test_traces_can_be_left_out(start: Any) -> None:
    run = start(FileLogger(log_traces=False))
    run.logger.log_traces({"a": 1})
    run.close()

    assert [] == lines()


def test_of_a_progress_bar_only_the_last_state_is_written(start: Any) -> None:
    run = start(FileLogger())
    for percent in (0, 50, 100):
        print(f"\rtrain {percent}%   ", end="", file=sys.stderr)
    print(file=sys.stderr)
    print("dos\r\nlines\r\n", end="")
    run.close()

    assert ["[stderr]: train 100%\n", "[stdout]: dos\n", "[stdout]: lines\n"] == lines()


def test_what_cannot_be_encoded_does_not_stop_the_run(start: Any) -> None:
    run = start(FileLogger())
    run.logger.log_hyperparameters({"name": "\udcff \u2588"})
    run.close()

    assert ['[hyperparameter]: name: "\\udcff \u2588" \n'] == LOG.read_text(encoding="utf-8").splitlines(keepends=True)


def test_the_process_may_have_no_output(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    run = start(FileLogger())
    print("text", file=sys.stderr)
    run.close()

    assert ["[stderr]: text\n"] == lines()


# ---- when it is written ----


def test_values_are_read_at_the_flush(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.loggers.file_logger._WRITE_SECONDS", 1e9)
    run = start(FileLogger(flush_interval=3), "100ba", 100)
    run.fit(stop_after=1)
    run.train_batch()
    loss = DeferredValue.of_tensor(torch.tensor(0.25))
    run.logger.log_metrics({"loss": loss})

    assert "DeferredValue(<not read>)" == repr(loss)
    assert not any("batch=2" in line for line in lines())

    run.train_batch()

    assert "DeferredValue(0.25)" == repr(loss)
    assert "[metric][batch=2]: loss: 0.2500 \n" in lines()


def test_between_flushes_the_file_lags_only_a_little(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.loggers.file_logger._WRITE_SECONDS", 0.0)
    run = start(FileLogger(), "100ba", 100)
    run.fit(stop_after=1)
    run.train_batch()

    assert "[metric][batch=1]: loss/train/total: 2.0000 \n" in lines()


def test_between_flushes_nothing_waits_for_a_value(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy is not there at once; lines behind it wait as well, so that they stay in order."""
    monkeypatch.setattr("composer.loggers.file_logger._WRITE_SECONDS", 0.0)
    run = start(FileLogger(), "100ba", 100)
    run.fit(stop_after=1)
    monkeypatch.setattr(DeferredValue, "ready", property(lambda value: False))
    monkeypatch.setattr(DeferredValue, "fetch", lambda values: None)
    run.train_batch()
    run.train_batch()

    assert "[metric][batch=1]: trainer/device_train_microbatch_size: 2 \n" == lines()[-1]

    monkeypatch.setattr(DeferredValue, "ready", property(lambda value: float(value) < 2.5))
    run.train_batch()

    assert "[metric][batch=2]: trainer/device_train_microbatch_size: 2 \n" == lines()[-1]


def flushes(run: Any, action: Callable[[], None]) -> int:
    """How often the file is flushed by an action."""
    uploads = run.loggers[1]
    before = len(uploads.files)
    action()
    return len(uploads.files) - before


@pytest.mark.parametrize(
    ("event", "batch", "epoch", "expected"),
    [
        ("batch_end", 1, 0, 0),
        ("batch_end", 3, 0, 1),
        ("batch_end", 6, 0, 1),
        ("epoch_end", 5, 1, 0),
        ("epoch_end", 15, 3, 1),
        ("epoch_start", 0, 0, 1),
        ("eval_start", 1, 0, 1),
        ("fit_end", 1, 0, 1),
        ("fit_start", 0, 0, 0),
    ],
)
def test_the_file_is_flushed_at_intervals_and_turning_points(
    start: Any, event: str, batch: int, epoch: int, expected: int
) -> None:
    run = start([FileLogger(flush_interval=3), Uploads()])
    run.state.timestamp = run.state.timestamp.copy(batch=batch, epoch=epoch)

    assert expected == flushes(run, lambda: run.engine.run_event(event))


def test_a_flush_hands_over_the_whole_file(start: Any) -> None:
    uploads = Uploads()
    run = start([FileLogger(remote_file_name="logs/{run_name}-{rank}.txt"), uploads])
    run.logger.log_hyperparameters({"a": 1})
    run.engine.run_event("fit_end")
    run.logger.log_hyperparameters({"b": 2})
    run.close()

    name, text = "logs/my-run-0.txt", "[hyperparameter]: a: 1 \n"
    assert [(name, text, True), (name, f"{text}[hyperparameter]: b: 2 \n", True)] == uploads.files


def test_a_value_that_cannot_be_read_does_not_take_the_rest_with_it(start: Any) -> None:
    class Broken(torch.Tensor):
        """Stands for a tensor on a device that has failed."""

        def item(self) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    uploads = Uploads()
    run = start([FileLogger(), uploads])
    broken = torch.tensor(1.0).as_subclass(Broken)
    run.logger.log_metrics({"a": 1, "loss": DeferredValue.of_tensor(broken)})
    print("the reason")

    with pytest.raises(RuntimeError, match="device-side assert"):
        run.engine.run_event("fit_end")

    expected = ["[metric][batch=0]: a: 1 \n", "[metric][batch=0]: loss: (could not be read) \n", "[stdout]: the reason\n"]
    assert expected == lines()
    assert ["".join(expected)] == [text for _, text, _ in uploads.files]

    run.engine.run_event("fit_end")  # the failure is reported once


# ---- names and modes ----


def test_names_are_known_once_the_run_has_begun(start: Any) -> None:
    logger = FileLogger("{run_name}/{rank}.txt", "/remote/{run_name}/{rank}.txt")

    for name in ("filename", "remote_file_name"):
        with pytest.raises(RuntimeError, match=f"`FileLogger.{name}` is not known before the run has begun"):
            getattr(logger, name)

    start(logger)

    assert "my-run/0.txt" == logger.filename
    assert "remote/my-run/0.txt" == logger.remote_file_name


def test_the_remote_name_is_the_local_one_without_a_leading_slash(start: Any, tmp_path: Path) -> None:
    logger = FileLogger(str(tmp_path / "log.txt"))
    start(logger)

    assert str(tmp_path / "log.txt").lstrip("/") == logger.remote_file_name


def test_every_rank_writes_its_own_file(start: Any, local_rank: Callable[[int], None]) -> None:
    local_rank(1)
    run = start(FileLogger())
    run.logger.log_metrics({"a": 1})
    run.close()

    assert "[metric][batch=0]: a: 1 \n" == Path("my-run/logs-rank1.txt").read_text()


def test_an_existing_file_is_not_replaced_unless_wanted(start: Any) -> None:
    LOG.parent.mkdir()
    LOG.write_text("precious")

    with pytest.raises(FileExistsError, match=r"The log file 'my-run/logs-rank0.txt' exists.*overwrite=True"):
        start(FileLogger())

    assert "precious" == LOG.read_text()
    assert "write" not in vars(sys.stdout)

    run = start(FileLogger(overwrite=True))
    run.logger.log_metrics({"a": 1})
    run.close()

    assert ["[metric][batch=0]: a: 1 \n"] == lines()


def test_the_same_logger_continues_its_own_file(start: Any) -> None:
    logger = FileLogger()
    for number in (1, 2):
        run = start(logger)
        print(number)
        run.logger.log_metrics({"a": number})
        run.close()

    assert ["[stdout]: 1\n", "[metric][batch=0]: a: 1 \n", "[stdout]: 2\n", "[metric][batch=0]: a: 2 \n"] == lines()


def test_closed_before_the_run_begins_it_leaves_nothing_behind(start: Any) -> None:
    logger = FileLogger()
    run = start([])
    logger.close(run.state, run.logger)
    print("text")

    assert not LOG.exists()
    assert "write" not in vars(sys.stdout)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`buffer_size` must not be 0"):
        FileLogger(buffer_size=0)
    with pytest.raises(ValueError, match="`flush_interval` must be at least 1, got 0"):
        FileLogger(flush_interval=0)


def test_two_loggers_write_the_same(start: Any) -> None:
    run = start([FileLogger("a.txt"), FileLogger("b.txt")])
    print("both")
    run.close()
    print("none")

    assert "[stdout]: both\n" == Path("a.txt").read_text() == Path("b.txt").read_text()
    assert "both\nnone\n" == sys.stdout.getvalue()  # type: ignore[attr-defined]


def test_an_uncaught_exception_of_a_process_is_in_its_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from composer.core import Engine, State
            from composer.loggers import Logger
            from composer.loggers.file_logger import FileLogger

            logger = FileLogger("log.txt")
            state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", callbacks=[logger])
            engine = Engine(state, Logger(state, logger))
            engine.run_event("init")
            print("working")
            raise RuntimeError("My Exception!")
            """
        )
    )
    process = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    written = (tmp_path / "log.txt").read_text().splitlines()

    assert 1 == process.returncode
    assert "working\n" == process.stdout
    assert process.stderr.endswith("RuntimeError: My Exception!\n")
    assert "[stdout]: working" == written[0]
    assert "[stderr]: RuntimeError: My Exception!" == written[-1]


# ---- capture ----


def test_a_forked_process_is_not_captured() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    taken: list[str] = []
    stream = io.StringIO()
    capture = Capture(stream, taken.append)
    capture._pid = -1  # as if this were the child

    stream.write("text")

    assert [] == taken
    assert "text" == stream.getvalue()


def test_a_write_replaced_by_others_is_left_alone() -> None:
    taken: list[str] = []
    stream = io.StringIO()
    capture = Capture(stream, taken.append)
    captured = stream.write
    stream.write = lambda text: captured(text.upper())  # type: ignore[method-assign]
    stream.write("a")
    capture.close()
    stream.write("b")

    assert ["A"] == taken
    assert "AB" == stream.getvalue()


def test_a_write_that_was_replaced_before_is_put_back() -> None:
    stream = io.StringIO()
    before = stream.write = lambda text: 0  # type: ignore[method-assign]
    capture = Capture(stream, print)
    capture.close()
    capture.close()

    assert before is stream.write


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a\nb", "c\n", "d"], ["a", "bc", "d"]),
        (["old\rnew\n"], ["new"]),
        (["old", "\r", "new", "\n"], ["new"]),
        (["a\r", "\nb\r\n"], ["a", "b"]),
        (["bar 1\r", "bar 2\r"], ["bar 2"]),
        (["\n\n"], ["", ""]),
        ([""], []),
    ],
)
def test_lines_are_made_from_pieces(pieces: list[str], expected: list[str]) -> None:
    taken: list[str] = []
    assembler = LineAssembler(taken.append)
    for piece in pieces:
        assembler.feed(piece)
    assembler.finish()

    assert expected == taken


def test_an_endless_progress_bar_takes_no_memory() -> None:
    assembler = LineAssembler(print)
    for i in range(1000):
        assembler.feed(f"\rstep {i}")

    assert len("step 999") == len(assembler._rest)
