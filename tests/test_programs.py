"""Programs written against the public interface of MosaicML's Composer run unchanged.

`programs/` has them as its users write them. MosaicML's Composer 0.32.1 has run the same files: in
`programs/checkpoints` there is a checkpoint of each from the middle of its run, with the weights at its end
(`*.end.pt`). Here the checkpoint is loaded, the run goes on, and reaches the same weights. `programs/held` has the
events of every whole run and the keys of its state. On a machine without a GPU,
MosaicML's Composer shards only if `torch.cuda.current_device` is replaced; that is how the checkpoint of
`fsdp_pretraining` was made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path

import program_runs
import pytest
import torch
from program_runs import PROGRAMS

from composer.testing import deep_compare
from composer.trainer import evaluation

CHECKPOINTS = PROGRAMS / "checkpoints"
ON_RANKS = {"fsdp_pretraining"}
# The Trainer that goes on with the checkpoint, if it is not the first one.
NUMBERS = {"early_stopping": 1, "fsdp_pretraining": 2}
# torch 2.7, which MosaicML's Composer needs, rounds otherwise in some operators, which Adam's division enlarges; the
# weights differ by more than 1e-2 if nothing is loaded.
TOLERANCE = 1e-4

pytestmark = pytest.mark.filterwarnings("default")  # the programs warn as they like
shards = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch shards on GPUs only")


@pytest.mark.parametrize("program", sorted({path.stem for path in PROGRAMS.glob("*.py")} - ON_RANKS))
def test_the_program_runs(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorders: list[program_runs.Recorder] = []
    trainers = program_runs.run(program, str(tmp_path), recorders=recorders)
    assert (tmp_path / "weights.pt").exists()

    held = "".join(f"Trainer {number}\n{recorder.summary()}" for number, recorder in enumerate(recorders))
    held += "".join(f"{key}\n" for key in program_runs.keys_of(trainers[-1].state.state_dict()))
    check_held(PROGRAMS / "held" / f"{program}.txt", held)


def check_held(file: Path, text: str) -> None:
    """Compare what must not change with its record; a missing one is written, and fails."""
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        pytest.fail(f"{file} was missing, and is written now: read it")
    assert text == file.read_text(), f"remove {file} and run the test again if the change is intended"


@pytest.mark.parametrize("program", sorted(path.stem for path in CHECKPOINTS.glob("*.pt") if path.suffixes == [".pt"]))
def test_a_run_of_the_reference_goes_on_to_its_end(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # An evaluation of the reference draws from the generator of dropout, which changes the training. Ours does not.
    monkeypatch.setattr(evaluation, "keep_global_states", nullcontext)
    number = NUMBERS.get(program, 0)
    resumed = program_runs.run(program, str(tmp_path), load=(number, CHECKPOINTS / f"{program}.pt"))[number]
    end = torch.load(CHECKPOINTS / f"{program}.end.pt", weights_only=True)

    deep_compare(dict(resumed.state.model.state_dict()), dict(end), atol=TOLERANCE, rtol=0)


@pytest.fixture
def s3_store(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("moto.server")
    return f"{request.getfixturevalue('s3')}/runs"


def launch_on_two_ranks(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "composer", "-n", "2", *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@shards
def test_sharded_pretraining_with_a_remote_store(s3_store: str, tmp_path: Path) -> None:
    launch_on_two_ranks(tmp_path, str(PROGRAMS / "fsdp_pretraining.py"), str(tmp_path), s3_store)

    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}


@shards
def test_a_sharded_run_of_the_reference_goes_on_to_its_end(s3_store: str, tmp_path: Path) -> None:
    with tarfile.open(CHECKPOINTS / "fsdp_pretraining.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):  # not in the first releases of 3.11
            archive.extractall(tmp_path, filter="data")
        else:
            archive.extractall(tmp_path)
    number = str(NUMBERS["fsdp_pretraining"])
    loaded = ("resumed.pt", number, str(tmp_path / "ep0-ba4"))
    launch_on_two_ranks(tmp_path, program_runs.__file__, *loaded, "fsdp_pretraining", str(tmp_path), s3_store)

    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    end = torch.load(CHECKPOINTS / "fsdp_pretraining.end.pt", weights_only=True)
    # The biases of keys have no gradient, since softmax ignores them: out of what processors round differently, Adam
    # makes steps of up to its learning rate, 1e-3. The run has 4 steps after the checkpoint.
    for block in range(2):
        name = f"network.blocks.{block}.layer.self_attn.in_proj_bias"
        bias, bias_at_end = (weights[name].tensor_split(3) for weights in (resumed, end))
        torch.testing.assert_close(bias[1], bias_at_end[1], atol=2 * 4 * 1e-3, rtol=0)
        for weights, parts in ((resumed, bias), (end, bias_at_end)):
            weights[name] = torch.cat([parts[0], parts[2]])
    deep_compare(resumed, end, atol=TOLERANCE, rtol=0)
