"""A training process that is killed at random moments ends as if nothing had happened.

`COMPOSER_KILLS=100` kills a hundred processes instead of six.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.testing import deep_compare
from composer.testing._processes import _context

PROGRAM = Path(__file__).with_name("survivor.py")
BATCHES = 24  # of the program's run
KILLS = int(os.environ.get("COMPOSER_KILLS", "6"))


class Run:
    """A run in a folder of its own, launched as often as it takes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder

    def launch(self) -> Any:
        process = _context().Process(
            target=runpy.run_path, args=(str(PROGRAM), {"FOLDER": str(self.folder)}, "__main__")
        )
        process.start()
        return process

    def finish(self) -> float:
        """Launch once more and let it end; seconds of training."""
        process = self.launch()
        self._wait_for_start(process)
        start = time.monotonic()
        process.join(120)
        assert process.exitcode == 0
        return time.monotonic() - start

    def kill(self, choose: random.Random, seconds: float) -> bool:
        """Launch, and kill at a random moment, every second time while a checkpoint is being written."""
        process = self.launch()
        self._wait_for_start(process)
        if choose.random() < 0.5:
            time.sleep(choose.random() * seconds)
        else:
            count = choose.randrange(1, BATCHES)
            for _ in range(count):
                if not self._wait_for_save(process):
                    break
        process.kill()
        process.join()
        return process.exitcode == -signal.SIGKILL  # not 0: it may have ended before

    def _wait_for_start(self, process: Any) -> None:
        while not (self.folder / f"started-{process.pid}").exists():
            assert process.is_alive() or process.exitcode == 0, "the process ended before it trained"
            time.sleep(0.001)

    def _wait_for_save(self, process: Any) -> bool:
        """Wait until another temporary file has come; False when the process ends first."""
        folder = self.folder / "checkpoints"
        seen: set[str] = set()
        while process.is_alive():
            if folder.is_dir():
                now = {name for name in os.listdir(folder) if name.endswith(".saving")}
                if now - seen:
                    return True
            time.sleep(0.0002)
        return False

    @property
    def log(self) -> dict[str, Any]:
        """Return the logged lines by content, without a line that a kill cut off, which is logged again."""
        lines = set()
        for line in (self.folder / "log.jsonl").read_text().splitlines():
            try:
                lines.add(json.dumps(json.loads(line), sort_keys=True))
            except ValueError:
                continue
        return dict.fromkeys(sorted(lines))

    @property
    def ended(self) -> Any:
        return torch.load(self.folder / "ended.pt", weights_only=False)


def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole")
    seconds = whole.finish()
    expected, log = whole.ended, whole.log
    assert expected["batch"] == BATCHES
    choose = random.Random(1)
    kills, trial = 0, 0
    while kills < KILLS:
        trial += 1
        assert trial < 5 * KILLS, "the kills come too late; the run is too short for this machine"
        run = Run(tmp_path / f"trial{trial}")
        for _ in range(choose.choice((1, 1, 2, 3))):
            kills += run.kill(choose, seconds)
        run.finish()

        deep_compare(run.ended, expected)
        assert run.log == log
        left = sorted(os.listdir(run.folder / "checkpoints"))
        assert len(left) == 4, left  # three, and the link: no leftovers


def test_a_complete_run_ends_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.finish()
    before = (run.folder / "log.jsonl").read_text()
    ended = run.ended
    files = sorted(os.listdir(run.folder / "checkpoints"))
    run.finish()

    assert (run.folder / "log.jsonl").read_text() == before
    deep_compare(run.ended["model"], ended["model"])
    assert sorted(os.listdir(run.folder / "checkpoints")) == files


@pytest.mark.parametrize("kills", [6])
def test_one_run_survives_many_kills(tmp_path: Path, kills: int) -> None:
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    whole.finish()
    choose = random.Random(2)
    for _ in range(kills):
        run.kill(choose, 0.15)
    run.finish()

    deep_compare(run.ended, whole.ended)
    assert run.log == whole.log
