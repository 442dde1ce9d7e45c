"""The logger with Slack's own client, against a server on this machine."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch

import composer.loggers
from composer.core import Event, Time
from composer.loggers import DeferredValue
from composer.loggers.slack_logger import SlackLogger
from composer.testing import LoggedRun


class Slack(HTTPServer):
    """Answers like Slack's `chat.postMessage`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {"ok": True}
        self.rate_limits = 0  # so many requests get the answer 429
        self.answering = threading.Event()
        self.answering.set()

    @property
    def keys(self) -> list[list[str]]:
        return [[block["text"]["text"].split(":*")[0][1:] for block in m["blocks"]] for m in self.messages]

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.messages]


class _Handler(BaseHTTPRequestHandler):
    server: Slack

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.answering.wait(30)
        if "json" in self.headers["Content-Type"]:
            message = json.loads(body)
        else:
            message = {key: value for key, [value] in parse_qs(body).items()}
            message["blocks"] = json.loads(message["blocks"])
        limited = self.server.rate_limits > 0
        self.server.rate_limits -= limited
        if not limited:
            self.server.messages.append(
                {**message, "path": self.path, "authorization": self.headers.get("Authorization")}
            )
        self.send_response(429 if limited else 200)
        self.send_header("Content-Type", "application/json")
        if limited:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(json.dumps({"ok": False, "error": "ratelimited"} if limited else self.server.answer).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def slack() -> Iterator[Slack]:
    server = Slack()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.answering.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def make(slack: Slack) -> Any:
    url = f"http://127.0.0.1:{slack.server_port}/api/"

    def make_logger(*args: Any, **kwargs: Any) -> SlackLogger:
        settings = {"slack_logging_api_key": "xoxb-1", "channel_id": "C1", "client_kwargs": {"base_url": url}}
        return SlackLogger(*args, **{**settings, **kwargs})

    return make_logger


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLACK_LOGGING_API_KEY", "SLACK_LOGGING_CHANNEL_ID", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_the_name_is_found() -> None:
    [point] = entry_points(group="composer.loggers", name="SlackLogger")

    assert SlackLogger is point.load() is composer.loggers.SlackLogger


def test_a_message_holds_the_latest_values(slack: Slack, make: Any) -> None:
    logger = make(["loss", "acc.*y$", "lr", "batch"], log_interval="2ba")  # "time/batch" begins differently
    logger.log_hyperparameters({"lr": 0.1, "other": 1})
    run = LoggedRun(logger)
    run.fit()
    run.close()
    run.close()

    keys = ["loss", "accuracy"]
    assert [["lr", *keys], keys, keys, keys] == slack.keys  # after batches 1, 2 and 4, and at close
    assert ["lr: 0.1, loss: 1, accuracy: 0.25", "loss: 2, accuracy: 0.5"] == slack.texts[:2]
    assert "loss: 5, accuracy: 1.25" == slack.texts[-1]
    first = slack.messages[0]
    assert ("/api/chat.postMessage", "C1", "Bearer xoxb-1") == (
        first["path"],
        first["channel"],
        first["authorization"],
    )
    assert {"type": "section", "text": {"type": "mrkdwn", "text": "*loss:* 1"}} == first["blocks"][1]


@pytest.mark.parametrize(
    ("interval", "messages"), [("1ep", 1), ("3ba", 3), (Time.from_epoch(1), 1), (2, 1), ("1ba", 5), ("100ba", 2)]
)
def test_messages_come_at_the_interval(slack: Slack, make: Any, interval: Any, messages: int) -> None:
    run = LoggedRun(make("loss", log_interval=interval))
    run.fit(5, end=False)
    run.state.timestamp = run.state.timestamp.to_next_epoch()
    run.engine.run_event("epoch_end")
    run.close()

    assert messages == len(slack.messages)
    assert "loss: 5" == slack.texts[-1]


def test_many_keys_do_not_wait_for_the_interval(slack: Slack, make: Any) -> None:
    run = LoggedRun(make(log_interval="100ba", max_logs_per_message=3))
    run.logger.log_metrics({f"k{i}": i for i in range(7)})
    run.logger.destinations[0]._sender.flush()

    assert [["k0", "k1", "k2"], ["k3", "k4", "k5"]] == slack.keys
    run.close()
    assert [["k6"]] == slack.keys[2:]


def test_everything_is_posted_without_keys(slack: Slack, make: Any) -> None:
    run = LoggedRun(make())
    run.logger.log_hyperparameters({"name": "x", "nothing": None})
    run.logger.log_metrics({"tiny": 1e-7})
    run.close()

    assert ["name: x, nothing: None, tiny: 1e-07"] == slack.texts


def test_a_formatter_makes_the_blocks(slack: Slack, make: Any) -> None:
    def formatter(data: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
        text = f"{sorted(data)} at {kwargs['step']}"
        return [{"type": "section", "text": {"type": "plain_text", "text": text}}]

    run = LoggedRun(make("loss", formatter))
    run.fit(2)
    run.close()

    assert ["['loss'] at 0", "['loss'] at 1"] == [m["blocks"][0]["text"]["text"] for m in slack.messages]


def test_an_error_is_logged_and_the_run_goes_on(slack: Slack, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    slack.answer = {"ok": False, "error": "channel_not_found"}
    run = LoggedRun(make("loss"))
    run.fit(2, end=False)
    with pytest.warns(UserWarning, match="`SlackLogger` failed to log: SlackApiError"):
        run.close()

    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert 2 == len(errors)
    assert "`SlackLogger` could not post loss: " in errors[0]
    assert "channel_not_found" in errors[0]


def test_an_error_ends_the_run_on_request(slack: Slack, make: Any) -> None:
    slack.answer = {"ok": False, "error": "channel_not_found"}
    run = LoggedRun(make("loss", on_error="raise"))
    with pytest.raises(RuntimeError, match="`SlackLogger` failed to log: SlackApiError"):
        run.fit(1)
    run.close()


def test_a_limited_rate_is_waited_for(slack: Slack, make: Any) -> None:
    slack.rate_limits = 1
    run = LoggedRun(make("loss"))
    run.fit(1)
    run.close()

    assert ["loss: 1"] == slack.texts


def test_no_step_waits_and_messages_are_merged_when_slack_is_behind(slack: Slack, make: Any) -> None:
    slack.answering.clear()
    run = LoggedRun(make("loss"), duration="100ba")
    run.fit(100, end=False)  # would take forever if a step waited
    slack.answering.set()
    run.close()

    assert 32 <= len(slack.messages) < 100
    assert "loss: 100" == slack.texts[-1]


def test_the_end_does_not_wait_for_a_slack_that_hangs(
    slack: Slack, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    slack.answering.clear()
    run = LoggedRun(make("loss", delivery_timeout=0.1))
    run.fit(1, end=False)
    run.close()

    assert "`SlackLogger` could not send everything in 0.1 seconds" in caplog.text
    assert [] == slack.messages


def test_values_that_are_not_posted_yet_do_not_prolong_the_wait_for_a_slack_that_fails(slack: Slack, make: Any) -> None:
    slack.answer = {"ok": False, "error": "channel_not_found"}
    logger = make("loss", delivery_timeout=0.01)
    run = LoggedRun(logger)
    run.fit(1, end=False)
    with pytest.warns(UserWarning, match="`SlackLogger` failed to log"):
        logger._sender.flush()
    while logger._sender.seconds_left > 0:
        time.sleep(0.01)
    logger.log_metrics({"loss": 2.0}, 1)
    logger._sender.wake()
    while logger._sender.pending:
        time.sleep(0.01)

    assert 0 == logger._sender.seconds_left
    run.close()


@pytest.mark.parametrize("given", [{}, {"slack_logging_api_key": "x"}, {"channel_id": "C1"}])
def test_missing_settings_are_a_warning(given: dict[str, str]) -> None:
    with pytest.warns(UserWarning, match="`SlackLogger` posts nothing: .* is not set"):
        logger = SlackLogger(**given)
    run = LoggedRun(logger)
    run.fit()
    run.close()

    assert logger.client is None


def test_settings_may_come_from_the_environment(slack: Slack, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_LOGGING_API_KEY", "xoxb-2")
    monkeypatch.setenv("SLACK_LOGGING_CHANNEL_ID", "C2")
    run = LoggedRun(make("loss", slack_logging_api_key=None, channel_id=None))
    run.fit(1)
    run.close()

    assert ("C2", "Bearer xoxb-2") == (slack.messages[0]["channel"], slack.messages[0]["authorization"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_interval": "1tok"}, "`log_interval` must be a positive number of batches or epochs"),
        ({"log_interval": "0ba"}, "`log_interval` must be a positive number of batches or epochs"),
        ({"max_logs_per_message": 51}, "`max_logs_per_message` must be from 1 to 50"),
        ({"max_logs_per_message": 0}, "`max_logs_per_message` must be from 1 to 50"),
        ({"include_keys": ["("]}, r"`include_keys` must be regular expressions, got '\('"),
        ({"delivery_timeout": 0}, "`delivery_timeout` must be positive, got 0"),
        ({"on_error": "ignore"}, "`on_error` must be 'warn' or 'raise', got 'ignore'"),
    ],
)
def test_bad_arguments_are_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slack_sdk", None)
    with pytest.raises(ImportError, match="`SlackLogger` needs `slack_sdk`, which is not installed"):
        SlackLogger()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_takes_part_in_computing(
    slack: Slack, make: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: rank)
    run = LoggedRun(make("loss"))
    computed: list[int] = []
    run.logger.log_metrics({"left_out": DeferredValue(lambda: computed.append(1) or torch.tensor(1.0))})
    run.fit(1)
    run.close()

    assert [1] == computed
    assert (1 - rank) == len(slack.messages)


def test_it_survives_all_events_copies_and_a_new_run(slack: Slack, make: Any) -> None:
    logger = make("loss")
    run = LoggedRun(logger)
    run.fit(1)
    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        copied.close(None, None)
        copied.post_close()
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)
    run.close()
    again = LoggedRun(logger)
    again.fit(1)
    again.close()

    assert ["loss: 1", "loss: 1"] == slack.texts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device(slack: Slack, make: Any) -> None:
    run = LoggedRun(make(["loss", "accuracy"], log_interval="1ba"), device="cuda")
    run.fit()
    run.close()

    assert "loss: 5, accuracy: 1.25" == slack.texts[-1]
