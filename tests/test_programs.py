"""Programs written against the public interface of MosaicML's Composer run unchanged.

`programs/` has them as its users write them. MosaicML's Composer 0.32.1 has run the same files: in
`programs/checkpoints` there is a checkpoint of each from the middle of its run, with the weights at its end
(`*.end.pt`). Here the checkpoint is loaded, the run goes on, and reaches the same weights.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import composer
from composer.testing import deep_compare
from composer.trainer import Trainer

PROGRAMS = Path(__file__).parent / "programs"
CHECKPOINTS = PROGRAMS / "checkpoints"
ON_RANKS = {"fsdp_pretraining"}
# torch 2.7, which MosaicML's Composer needs, rounds otherwise in some operators, which Adam's division enlarges; the
# weights differ by more than 1e-2 if nothing is loaded.
TOLERANCE = 1e-4

pytestmark = pytest.mark.filterwarnings("default")  # the programs warn as they like


def run(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, load: tuple[int, Path] | None = None) -> list[Any]:
    """Run a program in a folder and return its Trainers; `load` is the number of one, and the checkpoint it loads."""
    trainers: list[Trainer] = []

    class RecordedTrainer(Trainer):
        def __init__(self, **arguments: Any) -> None:
            if load is not None and len(trainers) == load[0]:
                arguments["load_path"] = str(load[1])
            trainers.append(self)
            super().__init__(**arguments)

    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(composer, "Trainer", RecordedTrainer, raising=False)
        patch.setattr(sys, "argv", [program, str(folder)])
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(folder)
        try:
            runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
        except AssertionError:
            if load is None:  # some programs check numbers that only a whole run logs
                raise
    return trainers


@pytest.mark.parametrize("program", sorted({path.stem for path in PROGRAMS.glob("*.py")} - ON_RANKS))
def test_the_program_runs(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(program, tmp_path, monkeypatch)
    assert (tmp_path / "weights.pt").exists()


@pytest.mark.parametrize("program", sorted(path.stem for path in CHECKPOINTS.glob("*.pt") if path.suffixes == [".pt"]))
def test_a_run_of_the_reference_goes_on_to_its_end(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 1 if program == "early_stopping" else 0
    resumed = run(program, tmp_path, monkeypatch, (number, CHECKPOINTS / f"{program}.pt"))[number]
    end = torch.load(CHECKPOINTS / f"{program}.end.pt", weights_only=True)

    deep_compare(dict(resumed.state.model.state_dict()), dict(end), atol=TOLERANCE, rtol=0)


@pytest.fixture
def s3_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    boto3, server_module = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "S3_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
    yield "s3://bucket/run"
    server.stop()


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch shards on GPUs only")
def test_sharded_pretraining_with_a_remote_store(s3_store: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "composer",
        "-n",
        "2",
        str(PROGRAMS / "fsdp_pretraining.py"),
        str(tmp_path),
        s3_store,
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
