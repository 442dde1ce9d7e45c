"""The description of machine and software."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.utils.collect_env

import composer.utils
from composer.utils import collect_env
from composer.utils.collect_env import (
    configure_excepthook,
    disable_env_report,
    enable_env_report,
    get_composer_env_dict,
    main,
    print_env,
)

KEYS = {
    "composer_version",
    "composer_commit_hash",
    "cpu_model",
    "cpu_count",
    "num_nodes",
    "gpu_model",
    "num_gpus_per_node",
    "num_gpus",
    "cuda_device_count",
}


@pytest.fixture(autouse=True)
def fast_and_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.collect_env, "get_pretty_env_info", lambda: "torch's report")  # takes seconds
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    collect_env._ReportingHook.enabled = True


def test_the_environment_is_a_dict_of_plain_values() -> None:
    env = get_composer_env_dict()

    assert KEYS == set(env)
    assert (version("composer-core"), os.cpu_count()) == (env["composer_version"], env["cpu_count"])
    assert env["cpu_model"]
    assert env == json.loads(json.dumps(env))


def test_the_environment_knows_the_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    env = get_composer_env_dict()

    assert (2, 8, 4, 4, "H200") == tuple(
        env[key] for key in ("num_nodes", "num_gpus", "num_gpus_per_node", "cuda_device_count", "gpu_model")
    )


def test_without_a_gpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    env = get_composer_env_dict()

    assert (0, 0, None) == (env["num_gpus"], env["num_gpus_per_node"], env["gpu_model"])


def test_what_the_environment_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("composer.utils._environment.is_initialized", lambda: True)

    assert get_composer_env_dict()["num_nodes"] is None


def test_the_commit_is_read_from_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        version = "1.2.3"

        def __init__(self, origin: str | None) -> None:
            self.origin = origin

        def read_text(self, name: str) -> str | None:
            return self.origin if name == "direct_url.json" else None

    origins: dict[str | None, str | None] = {
        '{"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}': "abc",
        '{"url": "file:///x", "dir_info": {}}': None,
        None: None,
    }
    for origin, expected in origins.items():
        monkeypatch.setattr(collect_env, "distribution", lambda name, origin=origin: Installed(origin))

        assert expected == get_composer_env_dict()["composer_commit_hash"]


def test_the_report_has_torch_s_part_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()

    print_env(file)
    main()

    assert file.getvalue() == capsys.readouterr().out
    assert "torch's report" in file.getvalue()
    assert f"composer version: {version('composer-core')}\n" in file.getvalue()
    assert "composer commit hash: unknown\n" in file.getvalue()


def test_torch_s_part_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.utils.collect_env, "run", lambda command: (0, "", ""))  # no programs: they take seconds
    file = io.StringIO()

    print_env(file)

    assert f"PyTorch version: {torch.__version__}" in file.getvalue()


def test_a_failure_of_torch_s_part_leaves_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.collect_env, "get_pretty_env_info", lambda: 1 / 0)
    file = io.StringIO()

    print_env(file)

    assert "not available: ZeroDivisionError" in file.getvalue()
    assert "composer version" in file.getvalue()


def crash(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_a_crash_is_reported_once_and_then_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Any] = []
    sys.excepthook = lambda *args: shown.append(args)

    configure_excepthook()
    configure_excepthook()
    error = ValueError("x")
    crash(error)

    assert [(ValueError, error, None)] == shown
    assert 1 == capsys.readouterr().err.count("torch's report")


def test_the_report_of_a_crash_can_be_switched_off_and_on(capsys: pytest.CaptureFixture[str]) -> None:
    sys.excepthook = lambda *args: None

    enable_env_report()
    disable_env_report()
    crash(ValueError())
    assert "" == capsys.readouterr().err

    enable_env_report()
    crash(ValueError())
    assert "torch's report" in capsys.readouterr().err


def test_an_interruption_is_no_crash(capsys: pytest.CaptureFixture[str]) -> None:
    sys.excepthook = lambda *args: None
    enable_env_report()

    crash(KeyboardInterrupt())

    assert "" == capsys.readouterr().err


def test_the_module_runs_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-c"]
    program = "import composer.utils, sys; assert 'composer.utils.collect_env' not in sys.modules"
    subprocess.run([*command, program], check=True)  # else `python -m composer.utils.collect_env` warns

    assert composer.utils.collect_env is collect_env
    assert composer.utils.print_env is print_env
