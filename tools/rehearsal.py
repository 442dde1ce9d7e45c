"""Rehearse releases against a package index on this machine: first releases, then one package alone.

In a clone, it releases some packages with all that they need, publishes their distributions, installs them from the
index into a new environment, releases one package again, and upgrades that one alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools import wheelhouse
from tools.release import missing, release
from tools.workspace import ROOT, Workspace, find_uv

UPGRADED, VERSION = "composer-mixup", "0.2.0"


def rehearse(folder: Path, packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Rehearse in an empty folder; return what was installed, before and after the upgrade.

    Args:
        folder: The folder.
        packages: The packages to install.
    """
    clone = folder / "clone"
    _run("git", "clone", "--quiet", "--branch", "main", str(ROOT), str(clone))
    for key, value in {"user.name": "Rehearsal", "user.email": "rehearsal@example.org"}.items():
        _run("git", "-C", str(clone), "config", key, value)
    _run("git", "-C", str(clone), "remote", "remove", "origin")
    workspace = Workspace(clone)
    needed = workspace.closure(packages)
    if unneeded := [f"packages/{name}" for name in set(workspace.names) - set(needed)]:
        _run("git", "-C", str(clone), "rm", "-r", "--quiet", *unneeded)
        _run("git", "-C", str(clone), "commit", "--quiet", "--message", "Only what is rehearsed")
    store = folder / "index"
    store.mkdir()
    with _index(store) as url:
        fresh = Workspace(clone, f"{url}/simple")
        while lacking := missing(fresh):
            name, version = lacking[0].split()
            _publish(clone, release(fresh, fresh[name], version), folder / "dist", url)
            fresh = Workspace(clone, fresh.index)
        python = _environment(folder / "environment")
        _install(python, url, packages)
        before = _versions(python)
        fragment = clone / "packages" / UPGRADED / "changes" / "1.added.md"
        fragment.write_text("A rehearsed change.\n", encoding="utf-8")
        _run("git", "-C", str(clone), "add", "--all")
        _run("git", "-C", str(clone), "commit", "--quiet", "--message", "A change")
        _publish(clone, release(fresh, fresh[UPGRADED], VERSION), folder / "dist", url)
        _install(python, url, ["--upgrade-package", UPGRADED, UPGRADED])
        _run(str(python), "-c", "import composer.core; from composer.algorithms import MixUp; MixUp()")
        return before, _versions(python)


@contextmanager
def _index(store: Path) -> Iterator[str]:
    """Serve a folder as a package index; yield its address."""
    port = _free_port()
    command = [sys.executable, "-m", "pypiserver", "run", "--port", str(port), "--interface", "127.0.0.1"]
    # Anybody may upload, and what this index lacks is not looked for in another one.
    command += ["--authenticate", ".", "--passwords", ".", "--disable-fallback", str(store)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the index did not start at {url}.") from None
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _publish(clone: Path, tag: str, dist: Path, url: str) -> None:
    """Build the distributions of a tag, and upload them."""
    name = tag.rpartition("-v")[0]
    built = wheelhouse.build(clone / "packages" / name, dist / tag)
    _run(find_uv(), "publish", "--quiet", "--publish-url", url, "--username", "any", "--password", "any",
         *map(str, built.parent.glob("*.whl")), *map(str, built.parent.glob("*.tar.gz")))  # fmt: skip


def _environment(folder: Path) -> Path:
    _run(find_uv(), "venv", "--quiet", "--python", sys.executable, str(folder))
    return folder / "bin" / "python"


def _install(python: Path, url: str, arguments: Sequence[str]) -> None:
    """Install from the index on this machine, and what is not there from that of others."""
    pinned = ["--constraint", str(ROOT / "tools" / "constraints" / "pinned.txt")]
    _run(find_uv(), "pip", "install", "--quiet", "--python", str(python), "--index", f"{url}/simple/", *pinned,
         "--refresh-package", UPGRADED, *arguments)  # fmt: skip


def _versions(python: Path) -> list[str]:
    listed = subprocess.run(
        [find_uv(), "pip", "freeze", "--python", str(python)], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    return sorted(line for line in listed if line.startswith("composer-"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "UV_NO_CONFIG": "1"})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before, after = rehearse(Path(folder), sys.argv[1:] or ("composer-core", UPGRADED))
    print("installed:", *before)
    print("upgraded: ", *after)
    expected = [f"{UPGRADED}=={VERSION}" if line.startswith(f"{UPGRADED}==") else line for line in before]
    if after != expected:
        sys.exit(f"expected {expected}")


if __name__ == "__main__":
    main()
