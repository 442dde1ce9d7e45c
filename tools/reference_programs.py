"""Run `tests/programs` with MosaicML's Composer, and keep a checkpoint from the middle and the weights at the end.

The interpreter is that of an environment with `mosaicml[nlp]==0.32.1` and nothing of this repository::

    python -m tools.reference_programs ENVIRONMENT/bin/python

`tests/test_programs.py` loads the checkpoints with these packages, and expects the same weights at the end.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "tests" / "programs"
CHECKPOINTS = PROGRAMS / "checkpoints"
# The batch of the checkpoint. Two programs are left out: one needs GPUs there, and the other one resumes by itself.
BATCHES = {
    "custom_algorithm": 3,
    "custom_callback_and_logger": 6,
    "early_stopping": 2,
    "export": 3,
    "finetune_bert": 5,
    "finetune_causal_lm": 2,
    "profiling": 3,
    "segmentation": 5,
    "several_evaluators": 3,
    "vision": 6,
}

# Runs there: adds a `CheckpointSaver` to the Trainer of a number.
_RUN = """
import runpy, sys
import torch, composer
from composer.callbacks import CheckpointSaver

program, folder, batch, number = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
construct, trainers = composer.Trainer.__init__, []

def constructed(self, **arguments):
    if len(trainers) == number:
        given = arguments.get("callbacks") or []
        arguments["callbacks"] = [*(given if isinstance(given, list) else [given]), CheckpointSaver(
            f"{folder}/kept", filename="{batch}.pt", latest_filename=None, remote_file_name=None,
            save_interval=f"{batch}ba",
        )]
    trainers.append(self)
    construct(self, **arguments)

composer.Trainer.__init__ = constructed
sys.argv = [program, folder]
try:
    runpy.run_path(program, run_name="__main__")
except (AssertionError, FileNotFoundError) as error:  # with a saver of its own, there is none for `save_folder`
    print(f"stopped after training: {error!r}")
torch.save(trainers[number].state.model.state_dict(), f"{folder}/end.pt")
"""


def main() -> None:
    """Run the programs one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path, help="the interpreter of an environment with MosaicML's Composer")
    parser.add_argument("programs", nargs="*", choices=[[], *BATCHES], help="their names; none: all")
    arguments = parser.parse_args()
    CHECKPOINTS.mkdir(exist_ok=True)
    for name in arguments.programs or BATCHES:
        number, batch = "1" if name == "early_stopping" else "0", str(BATCHES[name])
        with tempfile.TemporaryDirectory() as folder:
            path = str(PROGRAMS / f"{name}.py")
            subprocess.run([arguments.python, "-c", _RUN, path, folder, batch, number], cwd=folder, check=True)
            shutil.copy(Path(folder, "kept", f"{batch}.pt"), CHECKPOINTS / f"{name}.pt")
            shutil.copy(Path(folder, "end.pt"), CHECKPOINTS / f"{name}.end.pt")


if __name__ == "__main__":
    main()
