"""The tools that begin and end the life of a change: template, fragments, release, CI."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import (
    changes,
    derived,
    environment,
    new_package,
    release,
    wheelhouse,
)
from tools.release_all import release_all
from tools.tiny_tree import Tree, run_tool
from tools.workspace import ROOT, find_uv


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
    def released(self, tree: Tree) -> Path:
        """A tree whose `composer-core` and `composer-one` 0.1.0 are released."""
        tree.add_core()
        path = tree.add_algorithm("one")
        tree.commit()
        for name in ("composer-core", "composer-one"):
            release.release(tree.workspace, tree.workspace[name], "0.1.0")
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

    def test_no_fragment_no_release(self, tree: Tree) -> None:
        self.released(tree)

        with pytest.raises(release.ReleaseError, match=r"needs at least one change, got no fragment"):
            release.release(tree.workspace, tree.workspace["composer-one"], "0.2.0")

    @pytest.mark.parametrize("name", ["composer-core", "composer-all"])
    def test_new_packages_are_news_for_the_packages_that_are_built_from_all(self, tree: Tree, name: str) -> None:
        tree.add_built_from_all()
        tree.commit()
        release.release(tree.workspace, tree.workspace["composer-core"], "0.1.0")
        if name != "composer-core":
            release.release(tree.workspace, tree.workspace[name], "0.1.0")
        with pytest.raises(release.ReleaseError, match=r"needs at least one change, got no fragment"):
            release.check(tree.workspace, tree.workspace[name], "0.2.0")
        tree.add_algorithm("one")
        tree.commit()
        if name != "composer-core":
            release.release(tree.workspace, tree.workspace["composer-one"], "0.1.0")

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

    def test_a_breaking_change_needs_more_than_a_patch(self, tree: Tree) -> None:
        path = self.released(tree)
        tree.write({"changes/9.breaking.md": "`One` is gone."}, path)
        tree.commit()

        with pytest.raises(release.ReleaseError, match=r"must raise more than the patch number, got 0.1.1"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.1")

    def test_a_package_waits_for_the_releases_that_it_needs(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one", dependencies=("composer-core>=0.2,<1",))
        tree.commit()
        with pytest.raises(release.ReleaseError, match=r"needs `composer-core<1,>=0.2`, but it has no release"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.0")
        release.release(tree.workspace, tree.workspace["composer-core"], "0.1.0")
        with pytest.raises(release.ReleaseError, match=r"its last release is 0.1.0. Release composer-core first"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.0")

    def test_a_version_that_dependants_do_not_allow_is_refused(self, tree: Tree) -> None:
        self.released(tree)
        tree.write({"packages/composer-core/changes/9.breaking.md": "`ONE` is gone."})
        tree.commit()

        with pytest.raises(
            release.ReleaseError, match=r"composer-core 1.0.0 is not allowed .*: composer-one \(composer-core<1,>=0.1\)"
        ):
            release.check(tree.workspace, tree.workspace["composer-core"], "1.0.0")
        release.check(tree.workspace, tree.workspace["composer-core"], "0.2.0")

    def test_extras_have_bounds_that_releases_meet(self, tree: Tree) -> None:
        path = self.released(tree)
        other = tree.add_algorithm("two", dependencies=())
        text = (path / "pyproject.toml").read_text(encoding="utf-8")
        extras = '[project.optional-dependencies]\nmore = ["composer-two>=0.1,<1"]\n'
        (path / "pyproject.toml").write_text(f"{text}\n{extras}", encoding="utf-8")
        tree.write({"changes/7.added.md": "More."}, path)
        tree.commit()

        assert other.is_dir()
        with pytest.raises(release.ReleaseError, match=r"needs `composer-two<1,>=0.1`, but it has no release"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        release.release(tree.workspace, tree.workspace["composer-two"], "0.1.0")
        release.check(tree.workspace, tree.workspace["composer-one"], "0.2.0")
        tree.write({"packages/composer-two/changes/9.breaking.md": "`TWO` is gone."})
        tree.commit()
        with pytest.raises(release.ReleaseError, match=r"composer-two 1.0.0 is not allowed .*: composer-one"):
            release.check(tree.workspace, tree.workspace["composer-two"], "1.0.0")
        names = tree.workspace.in_order()
        assert names.index("composer-two") < names.index("composer-one")

    def test_a_release_is_made_from_main_as_it_is_published(self, tree: Tree, tmp_path: Path) -> None:
        path = self.released(tree)
        tree.git("clone", "--quiet", "--bare", str(tree.root), str(tmp_path / "origin"))
        tree.git("remote", "add", "origin", str(tmp_path / "origin"))
        tree.git("fetch", "--quiet", "origin")
        tree.git("branch", "--quiet", "--set-upstream-to", "origin/main")
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
            release.release(tree.workspace, tree.workspace["composer-one"], version)

        text = (path / "CHANGELOG.md").read_text()
        assert re.search(r"## 0\.2\.0 \(.*\)\n\n### Added\n\n- The same as 0\.2\.0rc1\.\n\n## 0\.2\.0rc1 ", text), text
        with pytest.raises(release.ReleaseError, match="needs at least one change"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.3.0")

    def test_a_version_that_is_described_comes_first(self, tree: Tree) -> None:
        tree.add_core()
        path = tree.add_algorithm("one")
        tree.commit()
        release.release(tree.workspace, tree.workspace["composer-core"], "0.1.0")
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
        release.release(tree.workspace, tree.workspace["composer-core"], "0.1.0")

        with pytest.raises(release.ReleaseError, match=r"already describes 0.1.0, got fragments .*7.added.md"):
            release.check(tree.workspace, tree.workspace["composer-one"], "0.1.0")


class TestReleaseAll:
    def test_packages_follow_what_they_need_some_at_a_time(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.add_algorithm("above", dependencies=("composer-one>=0.1,<1",))
        tree.commit()

        assert release_all(tree.workspace, 1) == ["composer-core-v0.1.0"]
        assert release_all(tree.workspace, 5) == ["composer-one-v0.1.0", "composer-above-v0.1.0"]
        assert release_all(tree.workspace, 5) == []
        assert tree.git("status", "--porcelain") == ""

    def test_a_package_that_cannot_be_released_ends_it_and_the_next_call_goes_on(self, tree: Tree) -> None:
        tree.add_core()
        path = tree.add_algorithm("one", version="0.1")
        tree.commit()
        with pytest.raises(release.ReleaseError, match=r"composer-one: .* Released before it: composer-core-v0.1.0"):
            release_all(tree.workspace, 5)
        text = (path / "pyproject.toml").read_text().replace('version = "0.1"', 'version = "0.1.0"')
        news = (path / "CHANGELOG.md").read_text().replace("## 0.1 ", "## 0.1.0 ")
        tree.write({"pyproject.toml": text, "CHANGELOG.md": news}, path)
        tree.commit()

        assert release_all(tree.workspace, 5) == ["composer-one-v0.1.0"]

    def test_the_command_says_what_is_left(self, tree: Tree) -> None:
        tree.add_core()
        tree.add_algorithm("one")
        tree.commit()

        run = run_tool("release_all", "--limit", "1", cwd=tree.root)

        assert (run.returncode, run.stdout, run.stderr) == (0, "composer-core-v0.1.0\n", "left: composer-one\n")
        assert run_tool("release_all", "--limit", "0", cwd=tree.root).stderr == "`--limit` must be at least 1, got 0.\n"


class TestNewPackage:
    def test_packages_of_all_kinds_pass_their_tests_as_generated(self, tree: Tree) -> None:
        tree.add_core()  # its name only: the tests run against the installed one
        paths = [
            new_package.make(tree.workspace, f"composer-new-{kind}", f"New{kind.title()}", kind)
            for kind in new_package.KINDS
        ]
        site = tree.root / "site"
        built = [wheelhouse.wheel_of(tree.workspace, tree.workspace[path.name]) for path in paths]
        command = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(site), *map(str, built)]
        subprocess.run(command, check=True)

        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tree.root),
             "-k", "not test_ranks_agree or TestNewGradient",  # starting processes takes longer than all the rest
             "-p", "no:cacheprovider", *(str(path / "tests") for path in paths)],
            cwd=tree.root, env={**os.environ, "PYTHONPATH": str(site)}, check=False, capture_output=True, text=True,
        )  # fmt: skip

        assert run.returncode == 0, run.stdout + run.stderr
        assert all(f"{path.name}/tests/test_contract.py" in run.stdout for path in paths)

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
