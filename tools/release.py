"""Release one package: version, changelog, commit and tag. Pushing the tag publishes it (see .github/workflows).

python -m tools.release [--check] composer-mixup 0.2.0
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tools.changes import UNRELEASED, fragment_problems
from tools.derived import BUILT_FROM_ALL
from tools.workspace import Package, Workspace

BRANCH = "main"


class ReleaseError(RuntimeError):
    """Error of a release that cannot be made."""


def check(workspace: Workspace, package: Package, version: str) -> None:
    """Check that a version of a package can be released; nothing is changed.

    Raises:
        ReleaseError: The tree is dirty, behind or of another branch, git does not know who commits, the version is not
            a later one in its usual form, there is no change to release or a fragment is misnamed, a dependency has no
            release that would do, or packages that depend on this one do not allow the version.
    """
    _check_tree(workspace)
    new_version = _canonical(version)
    released = workspace.releases(package.name)
    if released and new_version <= released[-1]:
        raise ReleaseError(f"the version must be later than the released {released[-1]}, got {version}.")
    _check_bounds(workspace, package, new_version)
    _with_version(package, version)
    if _untagged_commit(workspace, package, version) is not None:
        return
    wrong = [problem for fragment in package.fragments for problem in fragment_problems(package, fragment)]
    if wrong:
        raise ReleaseError(" ".join(wrong))
    if _is_handwritten(package, version):
        if package.fragments:
            raise ReleaseError(
                f"CHANGELOG.md already describes {version}, got fragments besides it: "
                f"{[fragment.name for fragment in package.fragments]}. Move their text into the section."
            )
        return
    waiting = re.search(rf"^## (\S+) {re.escape(UNRELEASED)}", package.news, re.MULTILINE)
    if waiting:
        raise ReleaseError(f"CHANGELOG.md describes {waiting[1]}, which is not released. Release it before {version}.")
    if not package.fragments and not _new_packages(workspace, package) and not _ends_candidates(released, new_version):
        raise ReleaseError(f"a release needs at least one change, got no fragment in {package.path / 'changes'}.")
    breaking = [fragment.name for fragment in package.fragments if ".breaking." in fragment.name]
    if breaking and released and new_version.release[:2] == released[-1].release[:2]:
        raise ReleaseError(f"a breaking change must raise more than the patch number, got {version} with {breaking}.")


def _check_tree(workspace: Workspace) -> None:
    """Check that the tree is that of the branch `main`, as it is published."""
    if _git(workspace, "status", "--porcelain"):
        raise ReleaseError("the working tree must be clean, got uncommitted changes. Commit or remove them.")
    branch = _git(workspace, "rev-parse", "--abbrev-ref", "HEAD").strip()
    if branch != BRANCH:
        raise ReleaseError(f"releases are made from the branch `{BRANCH}`, got `{branch}`. Merge it first.")
    _git(workspace, "var", "GIT_COMMITTER_IDENT")
    remote = subprocess.run(
        ["git", "config", f"branch.{BRANCH}.remote"], check=False, cwd=workspace.root, capture_output=True, text=True
    ).stdout.strip()
    remotes = _git(workspace, "remote").split()
    if remotes and not remote:
        raise ReleaseError(
            f"the branch `{BRANCH}` must follow that of a remote, to see what is published, got none. Run "
            f"`git branch --set-upstream-to {remotes[0]}/{BRANCH} {BRANCH}`."
        )
    if remote:
        _git(workspace, "fetch", "--tags", remote, BRANCH)
        behind = _git(workspace, "rev-list", "--count", "HEAD..FETCH_HEAD").strip()
        if behind != "0":
            raise ReleaseError(f"the branch `{BRANCH}` is {behind} commits behind `{remote}`. Run `git pull` first.")


def _canonical(version: str) -> Version:
    """Return a version that is written in the usual form, and not a local one."""
    try:
        found = Version(version)
    except InvalidVersion:
        raise ReleaseError(f"the version must look like 0.2.0, got {version!r}.") from None
    if found.local or str(found) != version or len(found.release) != 3:
        usual = found.public if len(found.release) == 3 else ".".join(map(str, (*found.release, 0, 0)[:3]))
        raise ReleaseError(
            f"the version must look like 0.2.0, 0.2.0rc1, 0.2.0.dev1 or 0.2.0.post1, got {version!r}. Use {usual!r}."
        )
    return found


def _check_bounds(workspace: Workspace, package: Package, version: Version) -> None:
    """Check the bounds between the package and the others of this repository, also those of extras."""
    for requirement in (*package.dependencies, *package.extras):
        name = canonicalize_name(requirement.name)
        if name not in workspace.packages:
            continue
        released = workspace.releases(name)
        early = version.is_prerelease or None  # a final release needs final ones, as pip chooses them
        if not any(requirement.specifier.contains(each, prereleases=early) for each in released):
            has = f"its last release is {released[-1]}" if released else "it has no release"
            raise ReleaseError(
                f"{package.name} needs `{requirement}`, but {has}. Release {name} first, or change the bound."
            )
    refusing = [
        f"{other.name} ({requirement})"
        for other in workspace.packages.values()
        for requirement in (*other.dependencies, *other.extras)
        if canonicalize_name(requirement.name) == package.name
        and other.name not in (package.name, *BUILT_FROM_ALL)  # the bounds of the latter follow
        and any(
            one.operator not in (">=", ">") and not one.contains(version, prereleases=True)
            for one in requirement.specifier
        )
    ]
    if refusing:
        raise ReleaseError(
            f"{package.name} {version} is not allowed by the packages that depend on it: {', '.join(refusing)}. Test "
            f"them with it, and widen their bounds first."
        )


def release(workspace: Workspace, package: Package, version: str) -> str:
    """Write the version and the changelog, commit, and tag; return the tag.

    If this fails or is interrupted, everything is as before. A commit of this version that has no tag is tagged.

    Raises:
        ReleaseError: See `check`.
    """
    check(workspace, package, version)
    commit = _untagged_commit(workspace, package, version)
    if commit is not None:
        return _tag(workspace, package, version, commit)
    before = _git(workspace, "rev-parse", "HEAD").strip()
    try:
        _write(workspace, package, version)
        _git(workspace, "add", "--all", str(package.path))
        _git(workspace, "commit", "--message", f"{package.name} {version}")
        return _tag(workspace, package, version, "HEAD")
    except BaseException:
        _git(workspace, "reset", "--quiet", "--hard", before)  # the tree was clean
        _git(workspace, "clean", "--quiet", "--force", "-d", "--", str(package.path))
        raise


def _tag(workspace: Workspace, package: Package, version: str, commit: str) -> str:
    tag = f"{package.name}-v{version}"
    _git(workspace, "tag", "--annotate", "--message", f"{package.name} {version}", tag, commit)
    return tag


def _untagged_commit(workspace: Workspace, package: Package, version: str) -> str | None:
    """Return the commit that released a version, if it is there without its tag."""
    section = re.search(rf"^## {re.escape(version)} \(\d.*\)", package.news, re.MULTILINE)
    if section is None or package.version != version or Version(version) in workspace.releases(package.name):
        return None
    found = _git(workspace, "log", "--format=%H", f"-S{section[0]}", "--", str(package.changelog)).split()
    return found[-1] if found else None


def _write(workspace: Workspace, package: Package, version: str) -> None:
    """Write the changelog and the version."""
    if _is_handwritten(package, version):
        today = datetime.now(timezone.utc).date().isoformat()
        text = package.news.replace(f"## {version} {UNRELEASED}", f"## {version} ({today})", 1)
    else:
        new, released = _new_packages(workspace, package), workspace.releases(package.name)
        if new:
            text = f"New packages: {', '.join(f'`{name}`' for name in new)}.\n"
            (package.path / "changes" / "+new-packages.added.md").write_text(text, encoding="utf-8")
        elif not package.fragments and _ends_candidates(released, Version(version)):
            text = f"The same as {released[-1]}.\n"
            (package.path / "changes" / "+final.added.md").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "towncrier", "build", "--yes", "--config", "pyproject.toml"]
        command += ["--dir", str(package.path), "--version", version, "--name", package.name]
        subprocess.run(command, cwd=workspace.root, check=True)
        text = package.news
    package.changelog.write_text(re.sub(r"\n{3,}", "\n\n", text.lstrip()), encoding="utf-8")
    path, text = _with_version(package, version)
    path.write_text(text, encoding="utf-8")


def _ends_candidates(released: list[Version], version: Version) -> bool:
    """Return True for the final release after candidates, whose fragments are in the changelog already."""
    return bool(released) and released[-1].is_prerelease and released[-1].release == version.release


def _new_packages(workspace: Workspace, package: Package) -> list[str]:
    """Return the packages made since the last release of a package that is built from what all others declare."""
    released = workspace.releases(package.name)
    if package.name not in BUILT_FROM_ALL or not released:
        return []
    with tempfile.TemporaryDirectory() as directory:
        workspace.check_out(package.name, released[-1], Path(directory))
        return sorted(set(workspace.names) - set(Workspace(Path(directory)).names))


def _is_handwritten(package: Package, version: str) -> bool:
    return f"## {version} {UNRELEASED}" in package.news


def _with_version(package: Package, version: str) -> tuple[Path, str]:
    """Return the path of a package's pyproject.toml, and its text with a new version."""
    path = package.path / "pyproject.toml"
    line = re.compile(rf'^version = "{re.escape(package.version)}"$', re.MULTILINE)
    text, count = line.subn(f'version = "{version}"', path.read_text(encoding="utf-8"))
    if count != 1:
        raise ReleaseError(f'{path} must have one line `version = "{package.version}"`, got {count}.')
    return path, text


def _git(workspace: Workspace, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], check=False, cwd=workspace.root, capture_output=True, text=True)
    if run.returncode != 0:
        raise ReleaseError(f"`git {' '.join(arguments)}` failed: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Release one package: version, changelog, commit and tag.")
    parser.add_argument("package", help="for example composer-mixup")
    parser.add_argument("version", help="for example 0.2.0")
    parser.add_argument("--check", action="store_true", help="only check that it can be released")
    arguments = parser.parse_args()
    workspace = Workspace(Path.cwd())
    try:
        package = workspace[arguments.package]
        if arguments.check:
            check(workspace, package, arguments.version)
        else:
            tag = release(workspace, package, arguments.version)
            print(f"tagged {tag}; to publish it: git push --atomic origin {BRANCH} {tag}")
    except (ReleaseError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
