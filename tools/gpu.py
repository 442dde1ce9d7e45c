"""Run what needs a CUDA device, and write one JSON: `python -m tools.gpu run`.

On a machine that reaches no registry, from a folder that was filled on another one with the same platform:

    python -m tools.gpu bundle FOLDER --python 3.12     # where there is a registry
    python -m tools.gpu run --wheels FOLDER             # where there is a GPU, beside the torch that is there
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_NEED_GPU = ("mark.gpu", "AlgorithmContract", "DatasetTransformContract")
_PRESENT = ("torch", "torchvision", "torchmetrics", "numpy", "pytest", "pillow")  # and what these need
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
_LIMIT = 480  # seconds
_GRACE = 20  # seconds for the results of tests that are stopped


def gpu_tests(root: Path) -> dict[str, list[str]]:
    """Return the files with tests that need a GPU, relative to the root, by the folder they are run from."""
    found: dict[str, list[str]] = {}
    for tests in sorted([*root.glob("packages/*/tests"), root / "tests"]):
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(tests.rglob("test_*.py"))}
        files = [str(path.relative_to(root)) for path, text in texts.items() if any(name in text for name in _NEED_GPU)]
        if files:
            found[tests.parent.name if tests.parent != root else "tests"] = files
    return found


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that need a GPU, where this module is a plugin of pytest: `python -m pytest -p tools.gpu`."""
    kept = [item for item in items if item.get_closest_marker("gpu") or item.originalname.startswith("test_on_a_gpu_")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def bundle(folder: Path, python: str, present: Sequence[str] = ()) -> None:
    """Fill a folder with the wheels of all packages, and of what the tests need beyond torch and its companions.

    Args:
        folder: The folder.
        python: The Python version of the other machine, for example "3.12".
        present: Further distributions that are there, with what they need.
    """
    from tools import wheelhouse
    from tools.workspace import Workspace, find_uv

    workspace = Workspace(_ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in wheelhouse.wheels(workspace, workspace.packages):
        shutil.copy(wheel, folder)
    tested = [name if name in workspace.packages else "composer-all" for name in gpu_tests(_ROOT)]
    wanted = {"pytest", "hypothesis"}
    for name in workspace.closure(tested):
        wanted.update(workspace.outside(workspace[name].dependencies))
    for name in tested:
        wanted.update(workspace.outside(workspace[name].test_dependencies))

    def resolved(requirements: set[str]) -> set[str]:
        command = [find_uv(), "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", python]
        command += ["--python-platform", "x86_64-manylinux_2_28", "--constraint", "tools/constraints/pinned.txt", "-"]
        lines = "\n".join(sorted(requirements))
        run = subprocess.run(command, input=lines, text=True, check=True, capture_output=True, cwd=_ROOT)
        return {line.partition(";")[0].strip() for line in run.stdout.splitlines() if line.strip()}

    others = sorted(resolved({*wanted, *_PRESENT, *present}) - resolved({*_PRESENT, *present}))
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *others], check=True)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} wheels, {size / 1e6:.0f} MB, in {folder}")


def _install(folder: Path, target: Path) -> None:
    """Install the wheels of a folder beside what is installed, which stays."""
    there = {_canonical(one.metadata["Name"]) for one in importlib.metadata.distributions()}
    wheels = sorted(folder.glob("*.whl"))
    missing = [path for path in wheels if (name := _canonical(path.name.split("-")[0])) not in there or _is_ours(name)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(target), *map(str, missing)], check=True)


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _is_ours(name: str) -> bool:
    return name.startswith("composer-")


def run(
    out: Path, wheels: Path | None = None, limit: float = _LIMIT, figures: bool = True, only: Sequence[str] = ()
) -> int:
    """Run the tests that need a GPU and then the figures; write both to a JSON file.

    Args:
        out: The file.
        wheels: A folder that `bundle` filled; None: the packages are installed.
        limit: Seconds after which tests are stopped and nothing is begun any more.
        figures: Measure the figures too.
        only: The folders whose tests are run, "tests" for those of the root. Empty: all.

    Returns:
        The exit code: 0 if everything ran and passed.
    """
    start = time.monotonic()
    report: dict[str, Any] = {"tests": {}, "figures": None}
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        if wheels is not None:
            _install(wheels, Path(scratch, "site"))
            paths = [str(Path(scratch, "site")), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        groups = {name: files for name, files in gpu_tests(_ROOT).items() if not only or name in only}
        with ThreadPoolExecutor(max(1, min(len(groups), (os.cpu_count() or 1) // 2))) as pool:
            left = limit - (time.monotonic() - start)
            tests = {
                pool.submit(_test, name, files, left, Path(scratch), environment): name
                for name, files in sorted(groups.items(), key=lambda item: item[0] != "tests")  # the longest first
            }
            for test in as_completed(tests):
                report["tests"][tests[test]] = test.result()
                out.write_text(json.dumps(report, indent=2), encoding="utf-8")  # if the machine goes away
        measured = Path(scratch, "figures.json")
        if figures:
            command = [sys.executable, "-m", "tools.bench", "gpu", "--json", str(measured)]
            subprocess.run(command, check=False, cwd=_ROOT, env=environment)
        if measured.exists():
            report["figures"] = json.loads(measured.read_text(encoding="utf-8"))
    report["seconds"] = round(time.monotonic() - start)
    out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    failed = {name: result for name, result in report["tests"].items() if result["exit"] != 0}
    for name, result in failed.items():
        print(f"{name}: exit code {result['exit']}, failed: {', '.join(result['failed']) or 'none'}")
    print(f"written to {out}")
    return 1 if failed or (figures and report["figures"] is None) else 0


def _test(name: str, files: Sequence[str], left: float, scratch: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run the tests of one package, in a process of its own: test folders have modules of the same names."""
    if left <= 0:
        return {"exit": "not run: no time left", "passed": 0, "failed": [], "skipped": []}
    results = scratch / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-p", "tools.gpu", "-q", "-rs", f"--junitxml={results}", *files]
    if name == "tests" and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(max(1, (os.cpu_count() or 1) // 2)), "-p", "no:benchmark"]  # which warns of the former
    log = scratch / f"{name}.log"
    with log.open("wb") as stream:  # several run at once
        run = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        try:
            code: int | str = run.wait(left)
        except subprocess.TimeoutExpired:
            code = "stopped: no time left"
            run.send_signal(signal.SIGINT)  # pytest writes the results so far
            try:
                run.wait(_GRACE)
            except subprocess.TimeoutExpired:
                run.kill()
    print(f"==== {name} ====\n{log.read_text(errors='replace')}", flush=True)
    cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    names = {case: f"{case.get('classname')}::{case.get('name')}" for case in cases}
    failed = [names[case] for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [names[case] for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    return {"exit": code, "passed": passed, "failed": failed, "skipped": skipped}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    bundling = commands.add_parser("bundle", help="collect wheels for a machine that reaches no registry")
    bundling.add_argument("folder", type=Path)
    bundling.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    bundling.add_argument("--present", nargs="+", default=(), metavar="NAME", help="distributions that are there, too")
    running = commands.add_parser("run", help="run the tests that need a GPU, and the figures")
    running.add_argument("--out", type=Path, default=Path("gpu.json"))
    running.add_argument("--wheels", type=Path)
    running.add_argument("--limit", type=float, default=_LIMIT, help="seconds (default: %(default)s)")
    running.add_argument("--no-figures", dest="figures", action="store_false", help="run the tests only")
    running.add_argument("--only", nargs="+", default=(), choices=sorted(gpu_tests(_ROOT)), metavar="NAME")
    options = parser.parse_args(arguments)
    if options.command == "bundle":
        bundle(options.folder, options.python, options.present)
        return 0
    return run(options.out, options.wheels, options.limit, options.figures, options.only)


if __name__ == "__main__":
    sys.exit(main())
