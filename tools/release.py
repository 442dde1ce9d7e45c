"""Release one package: version, changelog, commit and tag. Pushing the tag publishes it (see .github/workflows).

python -m tools.release [--check] [--yes] composer-mixup 0.2.0
python -m tools.release --resume    # finish a release that was killed; `--abort` undoes it
python -m tools.release --missing   # what the index lacks, in order: tags that were not published, and new packages
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tools.changes import UNRELEASED, fragment_problems
from tools.derived import BUILT_FROM_ALL
from tools.workspace import Package, Workspace

BRANCH = "main"
_BEGUN = "composer-release"  # This file in the folder of git exists while a release is made.


class ReleaseError(RuntimeError):
    """Error of a release that cannot be made."""


def check(workspace: Workspace, package: Package, version: str, *, yes: bool = False) -> None:
    """Check that a version of a package can be released; nothing is changed.

    Args:
        workspace: The packages.
        package: One of them.
        version: Its next version.
        yes: Allow a version that skips others, such as 0.20.0 after 0.1.0.

    Raises:
        ReleaseError: Another release was interrupted, the tree is dirty, behind or of another branch, git does not know
            who commits, a tag was moved, the version is not a later one in its usual form or skips others, there is no
            change to release or a fragment is misnamed, the index has no release of a dependency that would do,
            packages that depend on this one do not allow the version, or released ones allow a breaking one.
        RuntimeError: The index does not answer.
    """
    _check_tree(workspace)
    new_version = _canonical(version)
    released = workspace.releases(package.name)
    if released and new_version == released[-1] and new_version not in workspace.published(package.name):
        raise ReleaseError(
            f"{version} is tagged, but the index does not have it. Push the tag, or start the workflow `release` on it "
            f"again."
        )
    if released and new_version <= released[-1]:
        raise ReleaseError(f"the version must be later than the released {released[-1]}, got {version}.")
    last = next((each for each in reversed(released) if not each.is_prerelease), None)
    if last is not None and not yes:
        major, minor, patch = last.release
        following = [(major, minor, patch + 1), (major, minor + 1, 0), (major + 1, 0, 0)]
        if new_version.release not in (*following, released[-1].release):
            usual = ", ".join(".".join(map(str, numbers)) for numbers in following)
            raise ReleaseError(f"{last} is followed by one of {usual}, got {version}. If it is meant, add `--yes`.")
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
    if breaking and last is not None:
        number, count = ("major", 1) if last.major else ("minor", 2)
        if new_version.release[:count] == last.release[:count]:
            raise ReleaseError(
                f"a breaking change must raise the {number} number of {last}, got {version} with {breaking}."
            )
        if allowing := _released_that_allow(workspace, package, new_version):
            raise ReleaseError(
                f"a breaking change must not reach released packages that were not tested with it, but {version} is "
                f"allowed by {', '.join(allowing)}. Keep and deprecate what they use, or release {last.major + 1}.0.0."
            )


def _check_tree(workspace: Workspace) -> None:
    """Check that the tree is that of the branch `main`, as it is published, and that no release is under way."""
    begun = _git_path(workspace, _BEGUN)
    if begun.is_file():
        name, version, _ = begun.read_text(encoding="utf-8").split()
        raise ReleaseError(
            f"the release of {name} {version} was interrupted, or is still running. Finish it with `nox -s release -- "
            f"--resume`, or undo it with `nox -s release -- --abort`."
        )
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
        ours = _git(workspace, "for-each-ref", "--format=%(objectname) %(refname)", "refs/tags").splitlines()
        theirs = _git(workspace, "ls-remote", "--tags", remote).splitlines()
        here, there = ({tag: commit for commit, tag in map(str.split, lines)} for lines in (ours, theirs))
        moved = [tag.removeprefix("refs/tags/") for tag in here if there.get(tag, here[tag]) != here[tag]]
        if moved:
            raise ReleaseError(
                f"a tag must not move, but {', '.join(moved)} of `{remote}` and of this clone differ. Find out which "
                f"commits are published. If those of `{remote}` are, run `git tag --delete {' '.join(moved)}` here."
            )
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
    """Check the bounds between the package and the others of this repository, also those of extras.

    What is only tagged does not meet a bound: its publication may have failed, or the tag may be only in this clone.
    """
    for requirement in (*package.dependencies, *package.extras):
        name = canonicalize_name(requirement.name)
        if name not in workspace.packages:
            continue
        published = workspace.published(name)
        early = version.is_prerelease or None  # a final release needs final ones, as pip chooses them
        if not any(requirement.specifier.contains(each, prereleases=early) for each in published):
            has = f"its last version in the index is {published[-1]}" if published else "the index does not have it"
            raise ReleaseError(
                f"{package.name} needs `{requirement}`, but {has}. Publish {name} first, or change the bound."
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


def _released_that_allow(workspace: Workspace, package: Package, version: Version) -> list[str]:
    """Return the last releases of other packages whose bounds allow a version of this one, each with the bound."""
    found = []
    for name in set(workspace.names) - {package.name, *BUILT_FROM_ALL}:  # The latter use nothing of what they bring.
        for last in workspace.releases(name)[-1:]:
            text = _git(workspace, "show", f"{name}-v{last}:packages/{name}/pyproject.toml")
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "pyproject.toml").write_text(text, encoding="utf-8")
                released = Package.read(Path(folder))
            found += [
                f"{name} {last} ({requirement})"
                for requirement in (*released.dependencies, *released.extras)
                if canonicalize_name(requirement.name) == package.name
                and requirement.specifier.contains(version, prereleases=True)
            ]
    return sorted(found)


def release(workspace: Workspace, package: Package, version: str, *, yes: bool = False) -> str:
    """Write the version and the changelog, commit, and tag; return the tag.

    If this fails, everything is as before. If it is killed, `resume` finishes it and `abort` undoes it. A commit of
    this version that has no tag is tagged.

    Raises:
        ReleaseError: See `check`.
        RuntimeError: The index does not answer.
    """
    check(workspace, package, version, yes=yes)
    commit = _untagged_commit(workspace, package, version)
    if commit is not None:
        return _tag(workspace, package, version, commit)
    before = _git(workspace, "rev-parse", "HEAD").strip()
    begun = _git_path(workspace, _BEGUN)
    _replace(begun, f"{package.name} {version} {before}\n")
    try:
        _write(workspace, package, version)
        _git(workspace, "add", "--all", str(package.path))
        _git(workspace, "commit", "--message", f"{package.name} {version}")
        tag = _tag(workspace, package, version, "HEAD")
    except BaseException:
        _undo(workspace)
        raise
    begun.unlink()
    return tag


def abort(workspace: Workspace) -> tuple[str, str]:
    """Undo a release that was interrupted, and nothing else; return its package and version.

    Raises:
        ReleaseError: None was interrupted, there are other commits since, or another branch is checked out.
    """
    begun = _git_path(workspace, _BEGUN)
    if not begun.is_file():
        raise ReleaseError("there is no release that was interrupted.")
    name, version, _ = begun.read_text(encoding="utf-8").split()
    for locked in ("index", "HEAD", f"refs/heads/{BRANCH}", f"refs/tags/{name}-v{version}"):
        _git_path(workspace, f"{locked}.lock").unlink(missing_ok=True)  # A git that was killed leaves its locks.
    _undo(workspace)
    return name, version


def _undo(workspace: Workspace) -> None:
    """Take back the tag, the commit and the files of the release that has begun; leave what others have changed."""
    begun = _git_path(workspace, _BEGUN)
    name, version, before = begun.read_text(encoding="utf-8").split()
    tag, folder = f"{name}-v{version}", str(workspace.root / "packages" / name)
    branch = _git(workspace, "rev-parse", "--abbrev-ref", "HEAD").strip()
    since = _git(workspace, "log", "--format=%s", f"{before}...HEAD").splitlines()
    if branch != BRANCH or since not in ([], [f"{name} {version}"]):
        raise ReleaseError(
            f"the release of {name} {version} began on `{BRANCH}` at {before[:8]}, got `{branch}`, which differs from "
            f"that by {since}. Check out `{BRANCH}`, and move later commits to another branch."
        )
    if _git(workspace, "tag", "--list", tag):
        _git(workspace, "tag", "--delete", tag)
    _git(workspace, "reset", "--quiet", "--soft", before)
    _git(workspace, "restore", "--source", before, "--staged", "--worktree", "--", folder)
    _git(workspace, "clean", "--quiet", "--force", "-d", "--", folder)
    begun.unlink()


def resume(workspace: Workspace) -> str:
    """Make a release that was interrupted anew, from the state before it; return the tag.

    Raises:
        ReleaseError: See `abort` and `check`.
        RuntimeError: The index does not answer.
    """
    name, version = abort(workspace)
    fresh = Workspace(workspace.root, workspace.index)
    return release(fresh, fresh[name], version, yes=True)  # The number was accepted when it began.


def missing(workspace: Workspace) -> list[str]:
    """Return what the index lacks, each as `composer-mixup 0.1.0`, in the order in which it is to be published.

    First come the last tags that were not published: nothing is tagged while what it may need cannot be installed. The
    packages without a release follow, each after what it needs, at the versions that they declare.

    Raises:
        RuntimeError: The index does not answer.
    """
    tagged, new = [], []
    for name in workspace.in_order():
        released = workspace.releases(name)
        if not released:
            new.append(f"{name} {workspace[name].version}")
        elif released[-1] not in workspace.published(name):
            tagged.append(f"{name} {released[-1]}")
    return tagged + new


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
        today = datetime.now(UTC).date().isoformat()
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
    _replace(path, text)


def _replace(path: Path, text: str) -> None:
    """Write a file that is never half there: with half a pyproject.toml, no session of nox starts."""
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


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


def _git_path(workspace: Workspace, name: str) -> Path:
    """Return the path of a file in the folder of git."""
    return workspace.root / _git(workspace, "rev-parse", "--git-path", name).strip()


def _git(workspace: Workspace, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]  # Then a `git status` that is killed leaves no lock.
    run = subprocess.run(command, check=False, cwd=workspace.root, capture_output=True, text=True)
    if run.returncode != 0:
        raise ReleaseError(f"`git {' '.join(arguments)}` failed: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Release one package: version, changelog, commit and tag.")
    parser.add_argument("names", nargs="*", help="the package and its version: composer-mixup 0.2.0")
    parser.add_argument("--yes", action="store_true", help="also a version that skips others")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only check that it can be released")
    action.add_argument("--resume", action="store_true", help="finish a release that was interrupted")
    action.add_argument("--abort", action="store_true", help="undo a release that was interrupted")
    action.add_argument("--missing", action="store_true", help="print what the index lacks, in the order to publish it")
    options = parser.parse_args()
    alone = options.resume or options.abort or options.missing
    if len(options.names) != (0 if alone else 2):
        parser.error("name the package and the version, as in composer-mixup 0.2.0; some options take neither")
    workspace = Workspace(Path.cwd())
    try:
        if options.missing:
            print(*missing(workspace), sep="\n")
            return
        if options.abort:
            print("undone:", *abort(workspace))
            return
        if "repository" not in workspace.settings:
            raise ReleaseError(
                "`repository` of `[tool.composer]` in pyproject.toml must be the address of this repository, got none: "
                "on a registry, links and pictures of a package's page would lead nowhere. Set it, commit, and release "
                "then."
            )
        if options.resume:
            tag = resume(workspace)
        else:
            name, version = options.names
            if options.check:
                check(workspace, workspace[name], version, yes=options.yes)
                return
            tag = release(workspace, workspace[name], version, yes=options.yes)
        print(f"tagged {tag}; to publish it: git push --atomic origin {BRANCH} {tag}")
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
