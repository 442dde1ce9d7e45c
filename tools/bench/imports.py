"""The time and peak memory of imports on top of `import torch`, in new processes with compiled bytecode."""

from __future__ import annotations

import argparse
import ast
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

from tools.bench._measure import interleaved, machine, spread
from tools.readme_blocks import script
from tools.workspace import ROOT

# The peak is `VmHWM`: `ru_maxrss` of a new process begins at the memory of the process that started it.
_PROGRAM = """
import sys
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
exec(sys.argv[1])
end = time.perf_counter()
with open("/proc/self/status") as lines:
    peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
print(middle - start, end - middle, peak)
"""


@dataclass(frozen=True)
class _Cost:
    torch: float  # milliseconds
    added: float
    peak: float  # MiB


def readme_imports() -> str:
    """Return the import statements of the root README's Python blocks, one per line."""
    tree = ast.parse(script((ROOT / "README.md").read_text(encoding="utf-8")))
    return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))


def _measure(program: str) -> _Cost:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _PROGRAM, program]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    torch, added, peak = map(float, output.split())
    return _Cost(1e3 * torch, 1e3 * added, peak / 1024)


def main(arguments: list[str]) -> None:
    """Print milliseconds, the share of `import torch`, and the peak memory."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- imports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    programs = {line: line for line in readme_imports().splitlines() if line != "import torch"}
    programs["all of these"] = "\n".join(programs)
    programs["import torchmetrics"] = "import torchmetrics"  # done by the first model with metrics
    contestants = {"import torch": partial(_measure, "")}
    contestants.update({name: partial(_measure, program) for name, program in programs.items()})
    results = interleaved(contestants, options.rounds)
    width = max(map(len, results)) + 2
    print(f"{machine()}; {options.rounds} interleaved rounds; what the README imports, on top of `import torch`")
    print(f"{'ms':{width}}{'quartile':>10}{'median':>8}{'min-max':>16}{'of torch':>10}{'peak MiB':>10}")
    for name, costs in results.items():
        added = [cost.torch if name == "import torch" else cost.added for cost in costs]
        share = statistics.median(time / cost.torch for time, cost in zip(added, costs, strict=True))
        quartile, median = sorted(added)[len(added) // 4], statistics.median(added)
        peak = statistics.median(cost.peak for cost in costs)
        print(f"{name:{width}}{quartile:10.1f}{median:8.1f}{spread(added):>16}{share:10.1%}{peak:10.0f}")
