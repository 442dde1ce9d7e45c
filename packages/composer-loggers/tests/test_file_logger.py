from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.loggers import DeferredValue
from composer.loggers.file_logger import FileLogger

LOG = Path("my-run/logs-rank0.txt")


@pytest.fixture(autouse=True)
def own_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """Streams of the test's own, so that nothing of pytest's is captured."""


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

    assert lines() == [
        "[hyperparameter]: foo: 3 \n",
        "[metric][batch=1]: loss: 2 \n",
        "[metric][batch=2]: loss: 0.5000 \n",
        "[metric][batch=2]: b: 2 \n",
        "[trace]: algorithm_traces/MixUp/Event.INIT:1\n",
        '[table]: table: {"columns":["a","b"],"data":[[1,"x"]]}\n',
    ]


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

    assert lines() == [
        "[stdout]: Hello, stdout!\n",
        "[stdout]: Extra Line\n",
        "[stderr]: Hello, stderr!\n",
        "[stderr]: Extra Line2\n",
        "[stdout]: Hello, stdout!\n",
        "[stdout]: Extra Line3\n",
        "[metric][batch=0]: a: 1 \n",
        "[stderr]: Hello, stderr!\n",
        "[stderr]: Extra Line4\n",
    ]
    assert sys.stdout.getvalue() == "Hello, stdout!\nExtra Line\nHello, stdout!\nExtra Line3\n"  # type: ignore[attr-defined]


def test_the_prefix_is_at_the_start_of_a_line_only(start: Any) -> None:
    run = start(FileLogger())
    print("one", end=" ")
    print("line", end="")
    run.logger.log_metrics({"a": 1})
    print()
    print("\nunfinished", end="")
    run.close()

    assert lines() == ["[metric][batch=0]: a: 1 \n", "[stdout]: one line\n", "[stdout]: \n", "[stdout]: unfinished\n"]


def test_an_exception_reported_through_the_hook_is_on_the_disk_at_once(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    start(FileLogger())
    error = RuntimeError("My Exception!")

    sys.excepthook(RuntimeError, error, error.__traceback__)

    assert lines()[-1] == "[stderr]: RuntimeError: My Exception!\n"


def test_everything_is_put_back_at_the_end(start: Any) -> None:
    before = (sys.stdout, sys.stderr, sys.excepthook)
    run = start(FileLogger())
    run.close()
    print("after")
    print("after", file=sys.stderr)

    assert before == (sys.stdout, sys.stderr, sys.excepthook)
    assert "write" not in vars(sys.stdout)
    assert lines() == []


@pytest.mark.parametrize("wanted", ["stdout", "stderr"])
def test_capturing_one_stream_can_be_turned_off(start: Any, wanted: str) -> None:
    run = start(FileLogger(capture_stdout=wanted == "stdout", capture_stderr=wanted == "stderr"))
    print("text")
    print("text", file=sys.stderr)
    run.close()

    assert [f"[{wanted}]: text\n"] == lines()


def test_traces_can_be_left_out(start: Any) -> None:
    run = start(FileLogger(log_traces=False))
    run.logger.log_traces({"a": 1})
    run.close()

    assert lines() == []


def test_of_a_progress_bar_only_the_last_state_is_written(start: Any) -> None:
    run = start(FileLogger())
    for percent in (0, 50, 100):
        print(f"\rtrain {percent}%   ", end="", file=sys.stderr)
    print(file=sys.stderr)
    print("dos\r\nlines\r\n", end="")
    run.close()

    assert lines() == ["[stderr]: train 100%\n", "[stdout]: dos\n", "[stdout]: lines\n"]


def test_what_cannot_be_encoded_does_not_stop_the_run(start: Any) -> None:
    run = start(FileLogger())
    run.logger.log_hyperparameters({"name": "\udcff \u2588"})
    run.close()

    assert LOG.read_text(encoding="utf-8").splitlines(keepends=True) == ['[hyperparameter]: name: "\\udcff \u2588" \n']


def test_the_process_may_have_no_output(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    run = start(FileLogger())
    print("text", file=sys.stderr)
    run.close()

    assert lines() == ["[stderr]: text\n"]


# ---- names and modes ----


def test_names_are_known_once_the_run_has_begun(start: Any) -> None:
    logger = FileLogger("{run_name}/{rank}.txt", "/remote/{run_name}/{rank}.txt")

    for name in ("filename", "remote_file_name"):
        with pytest.raises(RuntimeError, match=f"`FileLogger.{name}` is not known before the run has begun"):
            getattr(logger, name)

    start(logger)

    assert logger.filename == "my-run/0.txt"
    assert logger.remote_file_name == "remote/my-run/0.txt"


def test_the_remote_name_is_the_local_one_without_a_leading_slash(start: Any, tmp_path: Path) -> None:
    logger = FileLogger(str(tmp_path / "log.txt"))
    start(logger)

    assert str(tmp_path / "log.txt").lstrip("/") == logger.remote_file_name


def test_every_rank_writes_its_own_file(start: Any, local_rank: Callable[[int], None]) -> None:
    local_rank(1)
    run = start(FileLogger())
    run.logger.log_metrics({"a": 1})
    run.close()

    assert Path("my-run/logs-rank1.txt").read_text() == "[metric][batch=0]: a: 1 \n"


def test_an_existing_file_is_not_replaced_by_default(start: Any) -> None:
    LOG.parent.mkdir()
    LOG.write_text("precious")

    with pytest.raises(FileExistsError, match=r"The log file 'my-run/logs-rank0.txt' exists.*overwrite=True"):
        start(FileLogger())

    assert LOG.read_text() == "precious"
    assert "write" not in vars(sys.stdout)

    run = start(FileLogger(overwrite=True))
    run.logger.log_metrics({"a": 1})
    run.close()

    assert lines() == ["[metric][batch=0]: a: 1 \n"]


def test_a_relaunched_run_appends_to_its_file(start: Any) -> None:
    for number in (1, 2):
        run = start(FileLogger(append=True))
        run.logger.log_metrics({"a": number})
        run.close()

    assert lines() == ["[metric][batch=0]: a: 1 \n", "[metric][batch=0]: a: 2 \n"]
    with pytest.raises(ValueError, match="exclude each other"):
        FileLogger(overwrite=True, append=True)


def test_the_same_logger_continues_its_own_file(start: Any) -> None:
    logger = FileLogger()
    for number in (1, 2):
        run = start(logger)
        print(number)
        run.logger.log_metrics({"a": number})
        run.close()

    assert lines() == ["[stdout]: 1\n", "[metric][batch=0]: a: 1 \n", "[stdout]: 2\n", "[metric][batch=0]: a: 2 \n"]


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
    assert sys.stdout.getvalue() == "both\nnone\n"  # type: ignore[attr-defined]


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

    assert process.returncode == 1
    assert process.stdout == "working\n"
    assert process.stderr.endswith("RuntimeError: My Exception!\n")
    assert written[0] == "[stdout]: working"
    assert written[-1] == "[stderr]: RuntimeError: My Exception!"
