"""The cost of `import composer` on top of `import torch`, in new processes with compiled bytecode."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial

from tools.bench._measure import interleaved, machine, spread

_PROGRAM = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import {module}
print(middle - start, time.perf_counter() - middle)
"""


def _milliseconds(module: str, part: int = 1) -> float:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _PROGRAM.format(module=module)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return 1e3 * float(output.split()[part])


def main(arguments: list[str]) -> None:
    """Print milliseconds, and the share of `import torch`."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- imports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    modules = ["composer", "composer.core", "composer.trainer"]
    contestants = {"torch": partial(_milliseconds, "composer", part=0)}
    contestants.update({module: partial(_milliseconds, module) for module in modules})
    results = interleaved(contestants, options.rounds)
    base = statistics.median(results["torch"])
    print(f"{machine()}; {options.rounds} interleaved rounds, medians")
    print(f"{'import':20}{'ms':>9}{'min-max':>18}{'of torch':>10}")
    for name, values in results.items():
        median = statistics.median(values)
        print(f"{name:20}{median:9.1f}{spread(values):>18}{median / base:10.1%}")
