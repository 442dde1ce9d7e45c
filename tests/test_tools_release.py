"""The tools that begin and end the life of a change: template, fragments, release, CI."""

from __future__ import annotations

import errno
import importlib.util
import os
import py_compile
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tools import (
    changes,
    derived,
    environment,
    new_package,
    release,
    wheelhouse,
)
from tools.tiny_tree import Tree, run_tool
from tools.workspace import ROOT, Workspace, find_uv


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package index, which lists what lies in its subfolders."""
    store = tmp_path / "index"
    store.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=store)) as server:
        Thread(target=server.serve_forever).start()
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}")
        yield store
        server.shutdown()


def publish(index: Path, tag: str) -> None:
    """Put the distributions of a tag into an index, with as much in them as a resolver reads."""
    name, _, version = tag.rpartition("-v")
    stem = f"{name.replace('-', '_')}-{version}"
    (index / name).mkdir(exist_ok=True)
    (index / name / f"{stem}.tar.gz").touch()
    with zipfile.ZipFile(index / name / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def add_origin(tree: Tree) -> Path:
    """Give a repository a remote that its branch follows; return its folder."""
    origin = tree.root.parent / "origin"
    tree.git("clone", "--quiet", "--bare", str(tree.root), str(origin))
    tree.git("remote", "add", "origin", str(origin))
    tree.git("fetch", "--quiet", "origin")
    tree.git("branch", "--quiet", "--set-upstream-to", "origin/main")
    return origin


@pytest.fixture(autouse=True)
def address(tree: Tree) -> None:
    """Set the address of the repository, without which nothing is released."""
    path = tree.root / "pyproject.toml"
    settings, unset = path.read_text(encoding="utf-8"), '# repository = "https://..."'
    assert unset in settings
    path.write_text(settings.replace(unset, 'repository = "https://example.org/us/composer"'), encoding="utf-8")


def step_of(workflow: str, job: str, start: str) -> str:
    """Return the commands of the step of a workflow that contain a text."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8"))["jobs"]
    (commands,) = (step["run"] for step in jobs[job]["steps"] if start in step.get("run", ""))
    return str(commands)


class TestChanges:
    def test_a_first_release_needs_no_fragment(self, tree: Tree) -> None:
        tree.add_core()

        assert list(changes.problems(tree.workspace["composer-core"], ["src/composer/core/__init__.py"])) == []

    def test_a_later_change_needs_a_fragment(self, tree: Tree) -> None:
        path = tree.add_core()
        tree.write({"CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-01-01)\n"}, path)
        package = tree.workspace["composer-core"]

        assert list(changes.problems(package, ["tests/test_core.py"])) == []
        (problem,) = changes.problems(package, ["src/composer/core/__init__.py"])
        assert problem == (
            "composer-core: a change of the source needs a fragment for the changelog, got none. "
            "Write changes/<issue>.<kind>.md."
        )
        tree.write({"changes/7.added.md": "`composer.core.TWO`."}, path)
        assert list(changes.problems(package, ["src/composer/core/__init__.py"])) == []

    def test_misnamed_fragments_and_missing_sections_are_found(self, tree: Tree) -> None:
        path = tree.add_core()
        tree.write({"CHANGELOG.md": "## 0.0.1 (2026-01-01)\n", "changes/7.improved.md": "Better."}, path)

        first, second, third = changes.problems(tree.workspace["composer-core"], [])

        assert "must start with `# Changelog`" in first
        assert "must have a section for 0.1.0" in second
        assert "got '7.improved.md'" in third

    def test_the_command_compares_with_a_commit(self, tree: Tree) -> None:
        path = tree.add_core()
        tree.write({"CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-01-01)\n"}, path)
        tree.commit()

        assert run_tool("changes", "HEAD", cwd=tree.root).returncode == 0
        tree.write({"src/composer/core/__init__.py": "TWO = 2\n"}, path)
        run = run_tool("changes", "HEAD", cwd=tree.root)
        assert run.returncode == 1
        assert "composer-core: a change of the source needs a fragment" in run.stderr

    def test_a_branch_is_compared_with_where_it_left(self, tree: Tree) -> None:
        path = tree.add_core()
        tree.write({"CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-01-01)\n"}, path)
        tree.commit()
        tree.git("branch", "feature")
        tree.write({"src/composer/core/more.py": "x = 1\n"}, path)
        tree.commit()
        tree.git("switch", "--quiet", "feature")

        assert run_tool("changes", "main", cwd=tree.root).returncode == 0
        assert run_tool("changes", "nowhere", cwd=tree.root).stderr.startswith("`base` must be a commit")

    def test_a_release_needs_no_fragment(self, tree: Tree) -> None:
        path = tree.add_core()
        tree.write({"CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-01-01)\n", "changes/7.added.md": "More."}, path)
        tree.commit()
        release.release(tree.workspace, tree.workspace["composer-core"], "0.2.0")

        assert run_tool("changes", "HEAD^", cwd=tree.root).returncode == 0

    def test_a_new_algorithm_changes_and_documents_no_other_package(self, tree: Tree) -> None:
        core, umbrella = tree.add_built_from_all()
        for path in (core, umbrella):
            tree.write({"CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-01-01)\n"}, path)
        derived.write(tree.workspace["composer-core"])
        tree.commit()

        new_package.make(tree.workspace, "composer-brand-new", "BrandNew")
        derived.write(tree.workspace["composer-core"])

        assert tree.git("status", "--porcelain") == "?? packages/composer-brand-new/\n"
        for package in tree.workspace.packages.values():
            assert list(changes.problems(package, changes.touched_since(tree.workspace, package, "HEAD"))) == []


class TestRelease:
    @pytest.fixture(autouse=True)
    def use_index(self, index: Path) -> None:
        self.index = index

    def publish(self, tree: Tree, name: str, version: str = "0.1.0") -> None:
        """Release a package, and publish it."""
        publish(self.index, release.release(tree.workspace, tree.workspace[name], version))

    def released(self, tree: Tree) -> Path:
        """A tree whose `composer-core` and `composer-one` 0.1.0 are published."""
        tree.add_core()
        path = tree.add_algorithm("one")
        tree.commit()
        for name in ("composer-core", "composer-one"):
            self.publish(tree, name)
        return path

    def test_a_first_release_dates_its_section(self, tree: Tree) -> None:
        path = self.released(tree)

        assert re.search(r"^## 0\.1\.0 \(\d{4}-\d\d-\d\d\)$", (path / "CHANGELOG.md").read_text(), re.MULTILINE)
        assert tree.git("tag") == "composer-core-v0.1.0\ncomposer-one-v0.1.0\n"
        assert tree.git("log", "-1", "--format=%s") == "composer-one 0.1.0\n"
        assert tree.git("status", "--porcelain") == ""

    def test_a_later_release_collects_the_fragments(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "`composer.algorithms.One` doubles."}, path)
        tree.write({"changes/8.fixed.md": "`composer.algorithms.One` no longer halves."}, path)
        tree.commit()

        run = run_tool("release", "composer-one", "0.2.0", cwd=tree.root)

        assert run.returncode == 0, run.stderr
        changelog = (path / "CHANGELOG.md").read_text()
        assert re.match(
            r"# Changelog\n\n## 0\.2\.0 \(\d{4}-\d\d-\d\d\)\n"
            r"\n### Added\n\n- `composer.algorithms.One` doubles. \(#7\)\n"
            r"\n### Fixed\n\n- `composer.algorithms.One` no longer halves. \(#8\)\n+## 0\.1\.0 \(",
            changelog,
        ), changelog
        assert tree.workspace["composer-one"].version == "0.2.0"
        assert tree.workspace["composer-one"].fragments == []
        assert "composer-one-v0.2.0" in tree.git("tag", "--points-at", "HEAD")
        assert tree.git("status", "--porcelain") == ""

    def test_nothing_is_released_without_the_address_of_the_repository(self, tree: Tree) -> None:
        self.released(tree)
        path = tree.root / "pyproject.toml"
        path.write_text(
            path.read_text(encoding="utf-8").replace('repository = "', '# repository = "'), encoding="utf-8"
        )
        tree.commit()

        run = run_tool("release", "--check", "composer-one", "0.1.1", cwd=tree.root)

        assert run.returncode == 1
        assert "must be the address of this repository, got none" in run.stderr

    def test_no_fragment_no_release(self, tree: Tree) -> None:
        self.released(tree)

        with pytest.raises(release.ReleaseError, match=r"needs at least one change, got no fragment"):
            release.release(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    @pytest.mark.parametrize("name", ["composer-core", "composer-all"])
    def test_new_packages_are_news_for_the_packages_that_are_built_from_all(self, tree: Tree, name: str) -> None:
        tree.add_built_from_all()
        tree.commit()
        self.publish(tree, "composer-core")
        if name != "composer-core":
            self.publish(tree, name)
        with pytest.raises(release.ReleaseError, match=r"needs at least one change, got no fragment"):
            release.check(tree.workspace, tree.workspace[name], "0.2.0")
        tree.add_algorithm("one")
        tree.commit()
        if name != "composer-core":
            self.publish(tree, "composer-one")

        release.release(tree.workspace, tree.workspace[name], "0.2.0")

        assert "### Added\n\n- New packages: `composer-one`.\n" in tree.workspace[name].news
        assert tree.workspace[name].fragments == []
        assert tree.git("status", "--porcelain") == ""

    def test_a_dirty_tree_is_refused(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "More."}, path)

        with pytest.raises(release.ReleaseError, match=r"the working tree must be clean"):
            release.release(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    @pytest.mark.parametrize(
        ("version", "message"),
        [
            ("0.1.0", r"must be later than the released 0.1.0"),
            ("next", r"must look like 0.2.0, got 'next'"),
            ("v0.2.0", r"got 'v0.2.0'. Use '0.2.0'"),
            ("0.2.0+x", r"got '0.2.0\+x'. Use '0.2.0'"),
            ("0.2", r"got '0.2'. Use '0.2.0'"),
            ("0.2.0-rc1", r"got '0.2.0-rc1'. Use '0.2.0rc1'"),
        ],
    )
    def test_a_version_that_is_no_later_one_is_refused(self, tree: Tree, version: str, message: str) -> None:
        self.released(tree)

        with pytest.raises(release.ReleaseError, match=message):
            release.check(tree.workspace, tree.workspace["composer-one"], version)

    def test_a_breaking_change_raises_the_minor_number_and_after_1_the_major_one(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/9.breaking.md": "`One` is gone."}, path)
        tree.commit()
        with pytest.raises(release.ReleaseError, match=r"must raise the minor number of 0.1.0, got 0.1.1"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.1")
        for version in ("0.2.0rc1", "0.2.0rc2", "1.0.0"):
            self.publish(tree, "composer-one", version)
            tree.write({"changes/10.breaking.md": "`Two` is gone."}, path)
            tree.commit()

        with pytest.raises(release.ReleaseError, match=r"must raise the major number of 1.0.0, got 1.1.0"):
            release.check(tree.workspace, tree.workspace["composer-one"], "1.1.0")
        release.check(tree.workspace, tree.workspace["composer-one"], "2.0.0rc1")

    def test_a_breaking_change_does_not_reach_released_packages(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"packages/composer-core/changes/9.breaking.md": "`ONE` is gone."})
        tree.commit()
        with pytest.raises(
            release.ReleaseError, match=r"but 0.2.0 is allowed by composer-one 0.1.0 \(.*\). .* or release 1.0.0"
        ):
            release.check(tree.workspace, tree.workspace["composer-core"], "0.2.0")

        text = (path / "pyproject.toml").read_text(encoding="utf-8").replace(">=0.1,<1", ">=1,<2")
        tree.write({"pyproject.toml": text, "changes/9.fixed.md": "It needs composer-core 1."}, path)
        tree.commit()
        self.publish(tree, "composer-core", "1.0.0")
        self.publish(tree, "composer-one", "0.1.1")

    def test_a_package_waits_for_the_releases_that_it_needs(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", dependencies=("composer-core>=0.2,<1",))
        tree.commit()
        with pytest.raises(
            release.ReleaseError, match=r"needs `composer-core<1,>=0.2`, but the index does not have it"
        ):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.0")
        self.publish(tree, "composer-core")
        tree.write({"packages/composer-core/changes/7.added.md": "More."})
        tree.commit()
        tag = release.release(tree.workspace, tree.workspace["composer-core"], "0.2.0")
        with pytest.raises(
            release.ReleaseError, match=r"its last version in the index is 0.1.0. Publish composer-core first"
        ):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.0")
        publish(self.index, tag)
        release.check(tree.workspace, tree.workspace["composer-one"], "0.1.0")

    def test_a_publication_is_whole_or_none(self, tree: Tree) -> None:
        self.released(tree)
        assert tree.workspace.published("composer-core") == tree.workspace.releases("composer-core")
        (self.index / "composer-core" / "composer_core-0.1.0.tar.gz").unlink()

        assert tree.workspace.published("composer-core") == []
        assert tree.workspace.published("composer-unknown") == []
        with pytest.raises(RuntimeError, match=r"must list what is published, but cannot be reached"):
            Workspace(tree.root, "http://127.0.0.1:9").published("composer-core")
        with pytest.raises(
            release.ReleaseError, match=r"0.1.0 is tagged, but the index does not have it. Push the tag"
        ):
            release.check(tree.workspace, tree.workspace["composer-core"], "0.1.0")

    def test_a_version_that_dependants_do_not_allow_is_refused(self, tree: Tree) -> None:
        self.released(tree)
        tree.write({"packages/composer-core/changes/9.breaking.md": "`ONE` is gone."})
        tree.commit()

        with pytest.raises(
            release.ReleaseError, match=r"composer-core 1.0.0 is not allowed .*: composer-one \(composer-core<1,>=0.1\)"
        ):
            release.check(tree.workspace, tree.workspace["composer-core"], "1.0.0")

    def test_extras_have_bounds_that_releases_meet(self, tree: Tree) -> None:
        path = self.released(tree)
        other = tree.add_algorithm("two", dependencies=())
        text = (path / "pyproject.toml").read_text(encoding="utf-8")
        extras = '[project.optional-dependencies]\nmore = ["composer-two>=0.1,<1"]\n'
        (path / "pyproject.toml").write_text(f"{text}\n{extras}", encoding="utf-8")
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()

        assert other.is_dir()
        with pytest.raises(release.ReleaseError, match=r"needs `composer-two<1,>=0.1`, but the index does not have it"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        self.publish(tree, "composer-two")
        release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        tree.write({"packages/composer-two/changes/9.breaking.md": "`TWO` is gone."})
        tree.commit()
        with pytest.raises(release.ReleaseError, match=r"composer-two 1.0.0 is not allowed .*: composer-one"):
            release.check(tree.workspace, tree.workspace["composer-two"], "1.0.0")
        names = tree.workspace.in_order()
        assert names.index("composer-two") < names.index("composer-one")

    def test_a_release_is_made_from_main_as_it_is_published(self, tree: Tree) -> None:
        path = self.released(tree)
        add_origin(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        tree.git("push", "--quiet", "origin", "main")
        tree.git("reset", "--quiet", "--hard", "HEAD^")
        with pytest.raises(release.ReleaseError, match=r"1 commits behind `origin`. Run `git pull` first"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        tree.git("switch", "--quiet", "--create", "feature")
        with pytest.raises(release.ReleaseError, match=r"made from the branch `main`, got `feature`"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    def test_a_tag_that_was_moved_is_named(self, tree: Tree) -> None:
        path = self.released(tree)
        origin = add_origin(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        for tag in ("composer-core-v0.1.0", "unrelated"):
            subprocess.run(["git", "tag", "--force", tag, "main"], cwd=origin, check=True, capture_output=True)

        with pytest.raises(
            release.ReleaseError,
            match=r"composer-core-v0.1.0 of `origin` and of this clone differ.*git tag --delete composer-core-v0.1.0",
        ):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        tree.git("tag", "--delete", "composer-core-v0.1.0")
        release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    @pytest.mark.parametrize("version", ["0.20.0", "0.1.2", "0.3.0rc1", "1.1.0"])
    def test_a_version_that_skips_others_must_be_meant(self, tree: Tree, version: str) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        for usual in ("0.1.1", "0.2.0", "0.2.0rc1", "0.1.0.post1"):
            release.check(tree.workspace, tree.workspace["composer-one"], usual)

        with pytest.raises(
            release.ReleaseError, match=r"0.1.0 is followed by one of 0.1.1, 0.2.0, 1.0.0, got .* add `--yes`"
        ):
            release.check(tree.workspace, tree.workspace["composer-one"], version)
        release.check(tree.workspace, tree.workspace["composer-one"], version, yes=True)

    def test_a_release_that_fails_leaves_everything_as_it_was(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        before = tree.git("rev-parse", "HEAD")
        tree.git("config", "gpg.program", "false")
        for step in ("commit", "tag"):
            tree.git("config", f"{step}.gpgSign", "true")
            with pytest.raises(release.ReleaseError, match=f"`git {step} .* failed"):
                release.release(tree.workspace, tree.workspace["composer-one"], "0.2.0")
            tree.git("config", "--unset", f"{step}.gpgSign")

            assert (tree.git("rev-parse", "HEAD"), tree.git("status", "--porcelain")) == (before, "")
            assert (path / "changes/7.added.md").exists()

        assert release.release(tree.workspace, tree.workspace["composer-one"], "0.2.0") == "composer-one-v0.2.0"

    def test_a_commit_without_its_tag_is_tagged(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        release.release(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        commits = tree.git("rev-list", "-n", "1", "composer-core-v0.1.0", "composer-one-v0.2.0").split()
        expected = {tag: tree.git("rev-list", "-n", "1", tag) for tag in tree.git("tag").split()}
        assert commits
        tree.git("tag", "--delete", "composer-core-v0.1.0", "composer-one-v0.2.0")

        for name, version in (("composer-core", "0.1.0"), ("composer-one", "0.2.0")):
            release.release(tree.workspace, tree.workspace[name], version)

        assert {tag: tree.git("rev-list", "-n", "1", tag) for tag in tree.git("tag").split()} == expected

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("7.feature.md", "More.", "must be named <issue>.<breaking|added|fixed>.md, got '7.feature.md'"),
            ("README.md", "More.", "must be named"),
            ("7.fixed.md", " \n", "must say what changed, got an empty '7.fixed.md'"),
        ],
    )
    def test_fragments_that_would_be_lost_are_refused(self, tree: Tree, name: str, text: str, message: str) -> None:
        path = self.released(tree)
        tree.write({f"changes/{name}": text}, path)
        tree.commit()

        with pytest.raises(release.ReleaseError, match=re.escape(message)):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    def test_a_final_release_follows_its_candidate(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        for version in ("0.2.0rc1", "0.2.0"):
            self.publish(tree, "composer-one", version)

        text = (path / "CHANGELOG.md").read_text()
        assert re.search(r"## 0\.2\.0 \(.*\)\n\n### Added\n\n- The same as 0\.2\.0rc1\.\n\n## 0\.2\.0rc1 ", text), text
        with pytest.raises(release.ReleaseError, match="needs at least one change"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.3.0")

    def test_a_version_that_is_described_comes_first(self, tree: Tree) -> None:
        tree.add_core()
        path = tree.add_algorithm("one")
        tree.commit()
        self.publish(tree, "composer-core")
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()

        with pytest.raises(release.ReleaseError, match=r"describes 0\.1\.0, which is not released"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    def test_main_must_follow_a_remote_if_there_is_one(self, tree: Tree, tmp_path: Path) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        tree.git("remote", "add", "origin", str(tmp_path))

        with pytest.raises(release.ReleaseError, match=r"must follow that of a remote.*--set-upstream-to origin/main"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    def test_tags_that_no_release_made_are_none(self, tree: Tree) -> None:
        self.released(tree)
        for tag in ("composer-one-v9", "composer-one-v0.3.1-rc1", "composer-one-v0.4.0+x"):
            tree.git("tag", tag)

        assert [str(version) for version in tree.workspace.releases("composer-one")] == ["0.1.0"]

    def test_tags_of_a_longer_name_are_those_of_another_package(self, tree: Tree) -> None:
        self.released(tree)
        for tag in ("composer-one-viz-v0.3.0", "composer-one-v2-v0.4.0"):
            tree.git("tag", tag)

        assert [str(version) for version in tree.workspace.releases("composer-one")] == ["0.1.0"]
        assert [str(version) for version in tree.workspace.releases("composer-one-viz")] == ["0.3.0"]
        assert [str(version) for version in tree.workspace.releases("composer-one-v2")] == ["0.4.0"]

    def test_nothing_is_changed_by_a_release_that_is_refused(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/7.added.md": "More."}, path)
        text = (path / "pyproject.toml").read_text()
        tree.write({"pyproject.toml": text.replace('version = "0.1.0"', "version='0.1.0'")}, path)
        tree.commit()

        with pytest.raises(release.ReleaseError, match=r"must have one line `version = \"0.1.0\"`, got 0"):
            release.release(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        assert tree.git("status", "--porcelain") == ""
        assert (path / "changes/7.added.md").exists()

    def test_fragments_beside_a_handwritten_section_are_refused(self, tree: Tree) -> None:
        tree.add_core()
        path = tree.add_algorithm("one")
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()
        self.publish(tree, "composer-core")

        with pytest.raises(release.ReleaseError, match=r"already describes 0.1.0, got fragments .*7.added.md"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.0")


def state(root: Path) -> object:
    """Return all that a release can change in a repository, and what it may leave beside that."""
    files = {path.relative_to(root): path.read_bytes() for path in root.glob("packages/**/*") if path.is_file()}
    commands = (["show-ref", "--head"], ["status", "--porcelain", "--ignored"])
    return files, [subprocess.check_output(["git", *command], cwd=root, text=True) for command in commands]


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"], ids=["handwritten section", "fragments"])
def test_a_release_that_was_killed_is_finished_or_undone(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    for role in ("AUTHOR", "COMMITTER"):  # With a fixed time, the same release is the same commit.
        monkeypatch.setenv(f"GIT_{role}_DATE", "2026-01-01T00:00:00Z")
    path = tree.add_core()
    tree.commit()
    if version != "0.1.0":
        release.release(tree.workspace, tree.workspace["composer-core"], "0.1.0")
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()

    def copy(source: Path, name: str) -> Workspace:
        return Workspace(shutil.copytree(source, tmp_path / name))

    whole = copy(tree.root, "whole")
    began = time.monotonic()
    release.release(whole, whole["composer-core"], version)
    duration = time.monotonic() - began
    before, after = state(tree.root), state(whole.root)
    moments = random.Random(version)
    interrupted = 0
    for number in range(15):
        killed = copy(tree.root, f"killed {number}")
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                release.release(killed, killed["composer-core"], version)
            finally:
                os._exit(0)
        os.setpgid(child, child)  # Here and in the child, as either may come first.
        marker = killed.root / ".git" / "composer-release"
        deadline = time.monotonic() + 10 * duration
        while not marker.is_file() and time.monotonic() < deadline:  # Before that, it only checks.
            time.sleep(0.001)
        time.sleep(moments.uniform(0, duration / 2) if number else 0)
        os.killpg(child, signal.SIGKILL)  # This kills its git and towncrier, too.
        os.waitpid(child, 0)
        other = copy(killed.root, f"other {number}")
        if not marker.is_file():
            assert state(killed.root) in (before, after)
            continue
        interrupted += 1
        release.abort(killed)
        assert state(killed.root) == before
        with pytest.raises(release.ReleaseError, match=f"the release of composer-core {version} was interrupted"):
            release.check(other, other["composer-core"], version)
        assert release.resume(other) == f"composer-core-v{version}"
        assert state(other.root) == after
    assert interrupted


def test_a_release_that_was_interrupted_is_left_where_there_are_later_commits(tree: Tree) -> None:
    tree.add_core()
    tree.commit()
    with pytest.raises(release.ReleaseError, match=r"there is no release that was interrupted"):
        release.resume(tree.workspace)
    (tree.root / ".git" / "composer-release").write_text(f"composer-core 0.1.0 {tree.git('rev-parse', 'HEAD')}")
    tree.write({"packages/composer-core/other.txt": "Work of somebody.", "notes.txt": "Work of somebody."})
    tree.git("add", "--all")
    tree.git("commit", "--quiet", "--message", "work")
    with pytest.raises(release.ReleaseError, match=r"differs from that by \['work'\]. .* move later commits"):
        release.abort(tree.workspace)
    tree.git("switch", "--quiet", "--create", "later")
    tree.git("branch", "--quiet", "--force", "main", "HEAD^")
    with pytest.raises(release.ReleaseError, match=r"began on `main` at .*, got `later`"):
        release.abort(tree.workspace)
    tree.git("switch", "--quiet", "main")
    left = {"changes/+final.added.md": "", "pyproject.tmp": ""}
    tree.write(left, tree.workspace["composer-core"].path)
    tree.write({"notes.txt": "Other work.", ".git/index.lock": "", ".git/refs/tags/composer-core-v0.1.0.lock": ""})

    run = run_tool("release", "--abort", cwd=tree.root)

    assert (run.returncode, run.stdout) == (0, "undone: composer-core 0.1.0\n"), run.stderr
    assert (tree.root / "notes.txt").read_text() == "Other work."
    assert tree.git("status", "--porcelain") == "?? notes.txt\n"


HOST = """\
#!/bin/bash
# It answers as the command line of the host does, and runs the workflow `release`, which may fail to publish.
case "$1 $2 $4" in
"auth setup-git ") ;;
"run list ci.yml") cat ../tested ;;
"run list release.yml") grep --line-number --line-regexp "$6" ../runs | tail -n 1 | cut -d : -f 1 ;;
"workflow run "*) echo "$5" >> ../runs ;;
"run watch "*)
    echo "$3" >> ../watched
    tag=$(sed --quiet "$3p" ../runs) name=${tag%-v*}
    [ "$tag" != "$FAILING" ] || exit 1
    stem=../index/$name/${name//-/_}-${tag##*-v}
    mkdir -p "../index/$name"
    touch "$stem.tar.gz" "$stem-py3-none-any.whl" ;;
*) exit 2 ;;
esac
"""


class TestReleaseAll:
    """The commands of the workflow, with a stub of its host and an index on this machine."""

    order = ("composer-core-v0.1.0", "composer-one-v0.1.0", "composer-above-v0.1.0")

    @pytest.fixture(autouse=True)
    def use_host(self, tree: Tree, index: Path) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add_algorithm("above", dependencies=("composer-one>=0.1,<1",))
        tree.commit()
        self.folder = tree.root.parent
        self.origin = add_origin(tree)
        for name, text in {"gh": HOST, "sleep": "#!/bin/sh\n"}.items():
            tree.write({name: text}, self.folder / "bin")
            (self.folder / "bin" / name).chmod(0o755)
        tree.write({"tested": tree.git("rev-parse", "HEAD"), "runs": ""}, self.folder)

    def run(self, tree: Tree, limit: int = 5, failing: str = "") -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join((str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
        return subprocess.run(
            ["bash", "-e", "-c", step_of("release-all.yml", "tag", "--missing")],
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "LIMIT": str(limit), "FAILING": failing},
            cwd=tree.root, check=False, capture_output=True, text=True,
        )  # fmt: skip

    def tagged(self) -> set[str]:
        return set(subprocess.check_output(["git", "tag"], cwd=self.origin, text=True).split())

    def published(self, tree: Tree) -> list[str]:
        return [tag for tag in self.order if tree.workspace.published(tag.rpartition("-v")[0])]

    @pytest.mark.parametrize("place", range(3))
    def test_a_publication_that_fails_stops_those_behind_it_and_comes_first_again(self, tree: Tree, place: int) -> None:
        failing = self.order[place]
        for _ in range(2):
            assert self.run(tree, failing=failing).returncode == 1
            assert self.published(tree) == list(self.order[:place])
            assert self.tagged() == set(self.order[: place + 1])

        run = self.run(tree)

        assert (run.returncode, run.stdout.splitlines()[-2:]) == (0, ["The index lacks:", ""]), run.stderr
        assert self.published(tree) == list(self.order)
        runs = (self.folder / "runs").read_text().split()
        assert runs == [*self.order[:place], failing, failing, *self.order[place:]]
        assert (self.folder / "watched").read_text().split() == [str(number) for number in range(1, len(runs) + 1)]

    def test_some_at_a_time(self, tree: Tree) -> None:
        for number in (1, 2):
            run = self.run(tree, limit=1)
            assert (run.returncode, self.published(tree)) == (0, list(self.order[:number])), run.stderr

        assert run.stdout.endswith("The index lacks:\ncomposer-above 0.1.0\n")
        assert tree.git("rev-parse", "main") == tree.git("rev-parse", "origin/main")

    @pytest.mark.parametrize("tested", ["HEAD^", ""])
    def test_main_must_have_passed_ci(self, tree: Tree, tested: str) -> None:
        tree.write({"packages/composer-one/src/composer/algorithms/one/more.py": ""})
        tree.commit()
        tree.write({"tested": tested and tree.git("rev-parse", tested)}, self.folder)

        run = self.run(tree)

        assert (run.returncode, self.tagged()) == (1, set())
        assert "main must have passed CI" in run.stdout


def test_a_tag_is_tested_before_it_is_published() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    needs = {name: job.get("needs") for name, job in yaml.safe_load(text)["jobs"].items()}

    assert needs == {"test": None, "build": None, "attest": ["test", "build"], "publish": ["build", "attest"]}
    assert 'nox --session "tests(${TAG%-v*})" "oldest(${TAG%-v*})"' in step_of("release.yml", "test", "nox --session")
    assert 'nox --session wheels sbom -- "${TAG%-v*}"' in step_of("release.yml", "build", "nox --session")


def test_a_tag_is_refused_whose_dependencies_the_index_lacks(tree: Tree, index: Path) -> None:
    tree.add_core()
    tree.add_algorithm("one", dependencies=("composer-core>=0.2,<1",))
    publish(index, "composer-core-v0.1.0")
    path = os.pathsep.join((str(Path(find_uv()).parent), os.environ["PATH"]))

    def resolve() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-c", step_of("release.yml", "test", "uv pip compile")],
            env={**os.environ, "PATH": path, "TAG": "composer-one-v0.1.0", "UV_NO_CONFIG": "1"},
            cwd=tree.root, check=False, capture_output=True, text=True,
        )  # fmt: skip

    refused = resolve()
    assert refused.returncode != 0
    assert "composer-core>=0.2" in refused.stderr
    publish(index, "composer-core-v0.2.0")
    assert resolve().returncode == 0, resolve().stderr


class TestNewPackage:
    @pytest.fixture(autouse=True)
    def address(self) -> None:
        """Set no address: the links of the template lead to packages that this tree does not have."""

    def test_packages_of_all_kinds_pass_their_tests_and_run_their_examples_as_generated(self, tree: Tree) -> None:
        tree.add_core()  # its name only: the tests run against the installed one
        paths = [
            new_package.make(tree.workspace, f"composer-new-{kind}", f"New{kind.title()}", kind)
            for kind in new_package.KINDS
        ]
        site = tree.root / "site"
        built = [wheelhouse.wheel_of(tree.workspace, tree.workspace[path.name]) for path in paths]
        command = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(site), *map(str, built)]
        subprocess.run(command, check=True)

        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tree.root),
             "-k", "not test_ranks_agree or TestNewGradient",  # starting processes takes longer than all the rest
             "-p", "no:cacheprovider", *(str(path / "tests") for path in paths)],
            cwd=tree.root, env=environment, check=False, capture_output=True, text=True,
        )  # fmt: skip
        examples = (
            "import pathlib, sys; from tools.readme_blocks import run; [*map(run, map(pathlib.Path, sys.argv[1:]))]"
        )
        ran = subprocess.run(
            [sys.executable, "-c", examples, *(str(path / "README.md") for path in paths)],
            cwd=tree.root, env=environment, check=False, capture_output=True, text=True,
        )  # fmt: skip

        assert run.returncode == 0, run.stdout + run.stderr
        assert all(f"{path.name}/tests/test_contract.py" in run.stdout for path in paths)
        assert ran.returncode == 0, ran.stderr

    @pytest.mark.parametrize("kind", new_package.KINDS)
    def test_no_mark_of_the_template_is_left(self, tree: Tree, kind: str) -> None:
        path = new_package.make(tree.workspace, "composer-brand-new", "BrandNew", kind)

        files = [file for file in path.rglob("*") if file.is_file()]
        mark = re.compile(r"__[A-Z]+__")
        assert [file for file in files if mark.search(str(file)) or mark.search(file.read_text())] == []
        assert (path / "src/composer/algorithms/brand_new/brand_new.py").is_file()
        assert (path / "changes/.gitignore").is_file()

    def test_the_module_of_another_package_is_refused(self, tree: Tree) -> None:
        tree.write({"src/composer/algorithms/utils/__init__.py": ""}, tree.add_core())

        with pytest.raises(ValueError, match="composer-core has the module 'utils'"):
            new_package.make(tree.workspace, "composer-utils", "Utils")

    def test_every_folder_of_the_template_is_a_kind(self) -> None:
        folders = {path.name for path in new_package.TEMPLATE.iterdir()}

        assert folders == {"shared", *new_package.KINDS}

    @pytest.mark.parametrize(
        ("distribution", "class_name", "message"),
        [
            ("brand-new", "BrandNew", r"`distribution` must be `composer-` and lower-case words"),
            ("composer-Brand", "Brand", r"`distribution` must be `composer-` and lower-case words"),
            ("composer-brand", "brand", r"`class_name` must be a class name"),
            ("composer-lambda", "Lambda", r"'lambda' is a keyword"),
            ("composer-brand", "None", r"'None' is a keyword"),
            ("composer-one", "Brand", r"but 'composer-one' exists already"),
            ("composer-brand", "One", r"`composer.algorithms.One` must be a new name; `composer-one` has it"),
        ],
    )
    def test_bad_and_taken_names_are_refused(
        self, tree: Tree, distribution: str, class_name: str, message: str
    ) -> None:
        tree.add_core()
        tree.add_algorithm("one")

        with pytest.raises(ValueError, match=message):
            new_package.make(tree.workspace, distribution, class_name)


class TestEnvironment:
    def test_the_cache_moves_beside_environments_that_could_not_link_to_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("UV_CACHE_DIR", raising=False)
        monkeypatch.delenv("UV_LINK_MODE", raising=False)
        monkeypatch.setattr(environment, "_device", lambda path: 1 if path == tmp_path else 2)

        environment.keep_links_possible(tmp_path)

        assert os.environ.pop("UV_CACHE_DIR") == str(tmp_path / "uv-cache")

    def test_a_cache_on_the_same_file_system_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("UV_LINK_MODE", raising=False)
        monkeypatch.setenv("UV_CACHE_DIR", "")
        monkeypatch.delenv("UV_CACHE_DIR")
        monkeypatch.setattr(environment, "_device", lambda path: 1)

        environment.keep_links_possible(tmp_path)

        assert "UV_CACHE_DIR" not in os.environ

    def test_bytecode_is_shared_by_environments_that_are_linked_to_the_same_sources(self, tmp_path: Path) -> None:
        source = tmp_path / "cache.py"
        source.write_text("value = 1\n")
        environments = [tmp_path / name for name in ("first", "second", "third")]
        packages = [folder / "lib/python3.11/site-packages" for folder in environments]
        for folder in packages:
            folder.mkdir(parents=True)
            os.link(source, folder / "same.py")
            (folder / "other.py").write_text("value = 2\n")
        for name in ("same", "other"):
            py_compile.compile(str(packages[0] / f"{name}.py"))
        (packages[0] / "other.py").unlink()
        for folder in environments[1:]:
            environment.share_bytecode(folder, tmp_path)

        compiled = Path(importlib.util.cache_from_source(str(packages[2] / "same.py")))
        assert [path.name for path in packages[2].glob("**/*.pyc")] == [compiled.name]
        before = compiled.stat().st_ino
        subprocess.run([sys.executable, "-c", "import same"], env={"PYTHONPATH": str(packages[2])}, check=True)
        assert compiled.stat().st_ino == before, "it was taken as it is"

    def test_without_hard_links_python_compiles_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError("Operation not permitted")

        (tmp_path / "cache.py").write_text("value = 1\n")
        packages = [tmp_path / name / "lib/python3.11/site-packages" for name in ("first", "second")]
        for folder in packages:
            folder.mkdir(parents=True)
            os.link(tmp_path / "cache.py", folder / "same.py")
        py_compile.compile(str(packages[0] / "same.py"))
        monkeypatch.setattr(os, "link", refuse)
        environment.share_bytecode(tmp_path / "second", tmp_path)

        assert [] == list(packages[1].glob("**/*.pyc"))

    def test_a_donor_that_another_session_removes_ends_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        packages = [tmp_path / name / "lib/python3.11/site-packages" for name in ("first", "second")]
        for folder in packages:
            (folder / "gone").mkdir(parents=True)
        scandir = os.scandir

        def scan(path: str | os.PathLike[str]) -> Any:
            if os.path.basename(path) == "gone":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", scan)
        environment.share_bytecode(tmp_path / "second", tmp_path)

    def test_a_python_that_does_not_start_does_not_count(self, tmp_path: Path) -> None:
        shim = tmp_path / "python3.11"
        shim.write_text("#!/bin/sh\nexit 127\n")
        shim.chmod(0o755)

        assert environment.runs(sys.executable)
        assert not environment.runs(str(shim))
        assert not environment.runs(str(tmp_path / "python3.12"))

    def test_the_pythons_of_pyenv_are_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "versions" / "3.13.0" / "bin").mkdir(parents=True)
        monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
        monkeypatch.setenv("PATH", "/usr/bin")

        environment.show_pyenv_versions()

        assert os.environ["PATH"] == f"/usr/bin{os.pathsep}{tmp_path}/versions/3.13.0/bin"
