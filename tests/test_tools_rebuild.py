"""Distributions are the same bytes wherever and whenever they are built, and their bill of materials is complete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from tools import sbom, wheelhouse
from tools.tiny_tree import Tree
from tools.workspace import ROOT

EPOCH = 1_700_000_000


def copy_repository(folder: Path, *, mtime: float, mode: int) -> Path:
    """Copy what is in version control; the files get a time and permissions."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "packages", "tools", "pyproject.toml", ".gitignore"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if not (ROOT / name).is_file():  # removed, but not committed
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod(mode)
        os.utime(target, (mtime, mtime))
    return folder


def test_another_folder_at_another_time_gives_the_same_bytes(tmp_path: Path) -> None:
    now = time.time()
    first = copy_repository(tmp_path / "first", mtime=now, mode=0o644)
    second = copy_repository(tmp_path / "elsewhere" / "second", mtime=now - 10**8, mode=0o600)

    for name in ("composer-core", "composer-all", "composer-mixup"):
        built = [
            wheelhouse.build(root / "packages" / name, tmp_path / f"dist-{root.name}" / name, epoch=EPOCH).parent
            for root in (first, second)
        ]
        files = [{path.name: path.read_bytes() for path in folder.glob("*.*") if path.is_file()} for folder in built]
        assert {".whl", ".gz"} <= {Path(file).suffix for file in files[0]}
        assert files[0] == files[1], name


def test_the_time_in_the_archive_is_that_of_the_commit(tree: Tree, tmp_path: Path) -> None:
    path = tree.add_core()
    tree.commit()
    assert abs(tree.workspace.commit_time() - time.time()) < 600

    wheel = wheelhouse.build(path, tmp_path, "--wheel", epoch=EPOCH)

    with zipfile.ZipFile(wheel) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {time.gmtime(EPOCH)[:6]}


def test_a_tag_is_built_with_the_pinned_build_tools(tree: Tree, tmp_path: Path) -> None:
    pinned = dict(
        line.split("==") for line in wheelhouse.PINNED.read_text().splitlines() if line.startswith("hatchling")
    )

    with zipfile.ZipFile(wheelhouse.build(tree.add_core(), tmp_path, "--wheel")) as archive:
        about = archive.read("composer_core-0.1.0.dist-info/WHEEL").decode()

    assert f"Generator: hatchling {pinned['hatchling']}\n" in about


def test_the_bill_of_materials_names_what_is_installed_and_no_path_of_the_machine(tree: Tree, tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="the bill of materials is made by cyclonedx-bom")
    tree.add_core()
    tree.add_algorithm("one", dependencies=("composer-core>=0.1,<1", "packaging>=20"))
    tree.commit()

    files = [
        sbom.write(tree.workspace, "composer-one", tmp_path / folder, constraint=wheelhouse.PINNED)
        for folder in ("first", "second")
    ]

    assert [file.name for file in files] == ["composer_one-0.1.0.cdx.json"] * 2
    text = files[0].read_text(encoding="utf-8")
    assert text == files[1].read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["metadata"]["component"]["name"] == "composer-one"
    assert {"composer-core", "packaging"} <= {component["name"] for component in found["components"]}
    assert str(tmp_path) not in text
    assert "file://" not in text
