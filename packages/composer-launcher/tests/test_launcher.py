"""The command `composer`: its arguments, the environment of the processes, and their output."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.cli._plan import Plan, parse_plan
from composer.cli.launcher import main

ACTOR = str(Path(__file__).with_name("actor.py"))
COMPOSER = [sys.executable, "-m", "composer"]
LAUNCH_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "BASE_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
NODES = {"WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_launch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCH_VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def plan(*arguments: str, **environment: str) -> Plan:
    return parse_plan([*arguments, ACTOR], environment)


# ---- arguments


def test_replica_groups_are_on_one_node_whatever_the_environment_says() -> None:
    assert plan("--replicas", "2", "-n", "1", **NODES).world_size == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["-n", "0"], {}, "`--nproc` must be at least 1, got 0"),
        ([], {"LOCAL_WORLD_SIZE": "two"}, "variable `LOCAL_WORLD_SIZE` must be an integer, got 'two'"),
        (["-n", "2", "--world_size", "1"], {}, r"`--world_size` must be at least `--nproc` (2), got 1"),
        (
            ["-n", "2", "--node_rank", "1"],
            {},
            "`--base_rank` and `--node_rank` must be 0, got 0 and 1",
        ),
        (["-n", "2"], NODES, "with several nodes `--node_rank` or `--base_rank` must be given"),
        (["-n", "3", "--node_rank", "0"], NODES, "`--base_rank` and `--node_rank` must both be given"),
        (["-n", "2", "--base_rank", "1"], NODES, "`--base_rank` must be a multiple of `--nproc` (2), got 1"),
        (["-n", "2", "--base_rank", "-2", "--node_rank", "0"], NODES, "must not be negative, got -2 and 0"),
        (["-n", "2", "--node_rank", "2"], NODES, "must be at most `--world_size` (4), got 4 + 2"),
        (["-n", "2", "--node_rank", "1", "--world_size", "4"], {}, "`--master_addr` and `--master_port` must be given"),
        (["-n", "2", "--node_rank", "1", "--master_port", "99999"], NODES, "`--master_port` must be a port, got 99999"),
        (["-n", "1", "-m", "-c"], {}, "`--module_mode` and `--command_mode` cannot be combined"),
        (["-n", "1", "--stderr", "{pid}"], {}, "`--stderr` may only contain the placeholders rank, local_rank"),
        (["-n", "1", "--shutdown_timeout", "-1"], {}, "`--shutdown_timeout` must be a number of seconds, got -1.0"),
        (["-n", "1", "-c", "no-such-command"], {}, "the command 'no-such-command' was not found"),
        (["-n", "1", "no-such.py"], {}, "there is no script 'no-such.py' in"),
        (["--replicas", "0"], {}, "`--replicas` must be at least 1 and `--max_restarts` at least 0, got 0 and 10"),
        (["--replicas", "2", "--stdout", "a", "--node_rank", "0"], {}, "alone, without `--node_rank`, `--stdout`. St"),
    ],
)
def test_invalid_arguments_are_reported_before_anything_starts(
    arguments: list[str], environment: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*arguments, **environment)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["-n", "2"], {}, (2, 2, 0, 0, "127.0.0.1", 0)),
        ([], {"LOCAL_WORLD_SIZE": "3"}, (3, 3, 0, 0, "127.0.0.1", 0)),
        (["-n", "2"], {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, (2, 2, 0, 0, "127.0.0.1", 0)),
        (["-n", "2", "--node_rank", "1"], NODES, (2, 4, 2, 1, "node0", 29500)),
        (["-n", "2"], {**NODES, "BASE_RANK": "2"}, (2, 4, 2, 1, "node0", 29500)),
        (["-n", "1", "--node_rank", "1", "--base_rank", "3"], NODES, (1, 4, 3, 1, "node0", 29500)),
        (["-n", "2", "--master_addr", "me", "--master_port", "7"], NODES | {"NODE_RANK": "0"}, (2, 4, 0, 0, "me", 7)),
    ],
)
def test_arguments_override_variables_and_missing_ones_are_inferred(
    arguments: list[str], environment: dict[str, str], expected: tuple[Any, ...]
) -> None:
    actual = plan(*arguments, **environment)

    assert expected == (
        actual.nproc,
        actual.world_size,
        actual.base_rank,
        actual.node_rank,
        actual.master_addr,
        actual.master_port,
    )


def test_without_gpus_one_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert plan().nproc == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert plan().nproc == 8


@pytest.mark.parametrize("module", ["composer", "composer.cli"])
def test_the_console_script_and_the_modules_are_the_launcher(module: str) -> None:
    (script,) = entry_points(group="console_scripts", name="composer")
    command = [sys.executable, "-m", module, "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert script.load() is main
    assert said == f"Composer {version('composer-launcher')}\n"


# ---- the processes


def test_each_process_gets_its_rank_and_expanded_arguments(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    pattern = str(tmp_path / "logs" / "{node_rank}-{rank}-{local_rank}-of-{world_size}-{local_world_size}.txt")
    old = Path(pattern.format(node_rank=0, rank=1, local_rank=1, world_size=2, local_world_size=2))
    old.parent.mkdir()
    old.write_text("of an earlier run\n")
    status = main(["-n", "2", "--stdout", pattern, ACTOR, "report", "out-$RANK-${LOCAL_RANK}", "~/x", "$UNKNOWN", "-n"])
    shown = capfd.readouterr()
    kept, written = old.read_text().splitlines()
    ranks = [json.loads(text) for text in (shown.out, written)]

    assert status == 0
    assert kept == "of an earlier run"
    for rank, said in enumerate(ranks):
        assert said["arguments"] == [f"out-{rank}-{rank}", "/home/me/x", "$UNKNOWN", "-n"]
        expected = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 0}
        expected |= {"PYTHONUNBUFFERED": 1, "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1, "OMP_NUM_THREADS": 1}
        assert {name: said["environment"][name] for name in expected} == {k: str(v) for k, v in expected.items()}
        assert said["environment"]["MASTER_ADDR"] == "127.0.0.1"
    assert ranks[0]["environment"]["MASTER_PORT"] == ranks[1]["environment"]["MASTER_PORT"] != "0"
    assert shown.err.count("OMP_NUM_THREADS=1") == 1
    assert "warning of rank 0" in shown.err
    assert "rank 1" not in shown.err


def test_verbose_shows_all_ranks_with_prefixes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "2", "-v", ACTOR, "report"]) == 0
    shown = capfd.readouterr()
    (other,) = (line for line in shown.out.splitlines() if line.startswith("[rank1]: "))

    assert json.loads(other.removeprefix("[rank1]: "))["environment"]["RANK"] == "1"
    assert f"composer: rank 1 runs `{sys.executable} {ACTOR} report`" in shown.err
    assert "\nwarning of rank 0\n" in shown.err
    assert "\n[rank1]: warning of rank 1\n" in shown.err


def test_variables_that_the_user_set_are_not_changed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    assert main(["-n", "2", ACTOR, "report"]) == 0
    shown = capfd.readouterr()
    environment = json.loads(shown.out)["environment"]

    assert (environment["OMP_NUM_THREADS"], environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("3", "3")
    assert "OMP_NUM_THREADS" not in shown.err


def test_modules_and_commands_can_be_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)

    assert main(["-n", "1", "-m", "package.program", "-x", "1"]) == 0
    assert capfd.readouterr().out == "__main__ package.program ['-x', '1']\n"
    assert main(["-n", "1", "-c", "echo", "rank", "$RANK", "of", "$WORLD_SIZE"]) == 0
    assert capfd.readouterr().out == "rank 0 of 1\n"
    assert main(["-n", "1", "-c", "sh", "-c", "trap"]) == 0
    assert capfd.readouterr().out == "", "no signal is ignored"


def test_a_program_that_cannot_be_started_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)

    assert main(["-n", "1", "-c", str(program)]) == 127
    assert f"composer: cannot start '{program}': " in capfd.readouterr().err


def test_on_the_platform_the_output_of_all_ranks_goes_to_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAICML_PLATFORM", "true")
    monkeypatch.setenv("MOSAICML_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("MOSAICML_GPU_LOG_FILE_PREFIX", "gpu_")
    assert main(["-n", "2", ACTOR, "report"]) == 0

    assert capfd.readouterr().out == ""
    for rank in range(2):
        text = (tmp_path / f"gpu_{rank}.txt").read_text()
        assert f'"RANK": "{rank}"' in text
        assert f"warning of rank {rank}" in text


def test_in_a_terminal_rank_zero_has_one_too() -> None:
    here, there = pty.openpty()
    command = [*COMPOSER, "-n", "1", ACTOR, "report"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=there, text=True)
    os.close(there)
    out, _ = process.communicate(timeout=60)
    err = os.read(here, 1000)
    os.close(here)

    assert json.loads(out)["terminal"] is True
    assert err == b"warning of rank 0\r\n"


# ---- several nodes

MEETING = """
import os, torch
torch.distributed.init_process_group("gloo")
total = torch.tensor([1.0 + torch.distributed.get_rank()])
torch.distributed.all_reduce(total)
print(os.environ["RANK"], os.environ["NODE_RANK"], os.environ["LOCAL_RANK"], total.item())
torch.distributed.destroy_process_group()
"""


def test_two_nodes_meet_at_the_first_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["-n", "1", "--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    other = subprocess.Popen(
        [*COMPOSER, *common, "--node_rank", "1", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    status = main([*common, "--node_rank", "0", str(script)])
    out, err = other.communicate(timeout=60)

    assert (status, other.returncode) == (0, 0), err
    assert capfd.readouterr().out == "0 0 0 3.0\n"
    assert out == "1 1 0 3.0\n"


def test_a_port_in_use_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status = main(["-n", "1", "--master_port", str(port), ACTOR, "report"])
    shown = capfd.readouterr()

    assert status == 2
    assert f"composer: error: `--master_port` must be a free port, got {port}: " in shown.err
    assert shown.out == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_per_device_and_collectives_of_nccl() -> None:
    run = subprocess.run([*COMPOSER, ACTOR, "sum_on_devices"], capture_output=True, text=True, timeout=120, check=False)

    count = torch.cuda.device_count()
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"world": count, "sum": count * (count + 1) // 2}
