"""Names of files, and checks of folders."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Timestamp
from composer.utils import dist
from composer.utils.file_helpers import (
    ensure_folder_has_no_conflicting_files,
    format_name_with_dist,
    format_name_with_dist_and_time,
    is_uri,
    parse_uri,
)

DIST = {"rank": 3, "local_rank": 1, "world_size": 4, "local_world_size": 2, "node_rank": 1}
COUNTS = {"epoch": 2, "batch": 20, "sample": 200, "token": 2000}
COUNTS_IN_EPOCH = {"batch_in_epoch": 7, "sample_in_epoch": 70, "token_in_epoch": 700}
NOW = Timestamp(
    **COUNTS,
    **COUNTS_IN_EPOCH,
    total_wct=timedelta(hours=1),
    epoch_wct=timedelta(minutes=1),
    batch_wct=timedelta(seconds=1.5),
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DIST.items():
        monkeypatch.setenv(name.upper(), str(value))


# ---- names


@pytest.mark.usefixtures("launched")
def test_the_process_and_the_run_are_filled_in() -> None:
    template = "{run_name}/{rank}-{local_rank}-{world_size}-{local_world_size}-{node_rank}/ep{epoch}-{custom}"

    assert "mnist/3-1-4-2-1/ep{epoch}-{custom}" == format_name_with_dist(template, "mnist")
    assert "mnist/3-1-4-2-1/ep{epoch}-x" == format_name_with_dist(template, "mnist", custom="x")
    assert "0" == format_name_with_dist("{rank}", "mnist", rank=0)


def test_what_is_not_known_about_the_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DIST:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("composer.utils._environment.is_initialized", lambda: True)

    # The getters were bound to the real `torch.distributed`; only the look-up believes that it is initialised.
    assert "0-{local_rank}-{node_rank}" == format_name_with_dist("{rank}-{local_rank}-{node_rank}", "mnist", rank=0)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        *[(name, str(value)) for name, value in {**COUNTS, **COUNTS_IN_EPOCH}.items()],
        ("total_wct", "3600.0"),
        ("epoch_wct", "60.0"),
        ("batch_wct", "1.5"),
        ("epoch:04d", "0002"),
        ("run_name", "mnist"),
        ("rank", "0"),
        ("unknown", "{unknown}"),
    ],
)
def test_the_training_time_is_filled_in(variable: str, expected: str) -> None:
    assert expected == format_name_with_dist_and_time(f"{{{variable}}}", "mnist", NOW)


def test_given_variables_win_over_the_training_time() -> None:
    assert "9" == format_name_with_dist_and_time("{epoch}", "mnist", NOW, epoch=9)


# ---- URIs


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("backend://bucket@namespace/a/b", ("backend", "bucket", "a/b")),
        ("s3://bucket/a/b.pt", ("s3", "bucket", "a/b.pt")),
        ("S3://Bucket/A", ("s3", "Bucket", "A")),
        ("s3://bucket", ("s3", "bucket", "")),
        ("s3://bucket/", ("s3", "bucket", "")),
        ("gs://bucket/a?b#c", ("gs", "bucket", "a?b#c")),
        ("AZURE_BLOBS://bucket/a", ("azure", "bucket", "a")),
        ("azure://bucket/a", ("azure", "bucket", "a")),
        ("dbfs:/Volumes/a/b", ("dbfs", "", "Volumes/a/b")),
        ("file:///a/b", ("file", "", "a/b")),
        ("s3://bucket/{run_name}/ep{epoch}", ("s3", "bucket", "{run_name}/ep{epoch}")),
        ("/a/b", ("", "", "/a/b")),
        ("a/b", ("", "", "a/b")),
        ("a:b", ("", "", "a:b")),
        ("a/b://c", ("", "", "a/b://c")),
        (r"C:\a\b", ("", "", r"C:\a\b")),
        ("C:/a/b", ("", "", "C:/a/b")),
        ("", ("", "", "")),
    ],
)
def test_a_uri_has_a_backend_a_bucket_and_a_path(uri: str, expected: tuple[str, str, str]) -> None:
    assert expected == parse_uri(uri)
    assert (expected[0] != "") == is_uri(uri)


@given(st.text(st.characters(exclude_characters=":"), max_size=20))
def test_what_has_no_colon_is_a_local_path(path: str) -> None:
    assert ("", "", path) == parse_uri(path)


@pytest.mark.parametrize("uri", [None, 3, b"s3://bucket", Path("data")])
def test_only_a_string_is_a_uri(uri: Any) -> None:
    for function in (parse_uri, is_uri):
        with pytest.raises(TypeError, match="`uri` must be a string, a URI or a local path, got "):
            function(uri)


# ---- folders


@pytest.mark.parametrize(
    ("filename", "existing", "is_conflict"),
    [
        ("blank", "blank", False),
        ("ep{epoch}", "ep2", False),
        ("ep{epoch}", "ep3", True),
        ("ep{epoch}", "ep3.bak", False),
        ("ep{epoch}.pt", "ep3xpt", False),
        ("ba{batch}.pt", "ba20.pt", False),
        ("ba{batch}.pt", "ba21.pt", True),
        ("sp{sample}", "sp201", True),
        ("sp{sample}", "sp200", False),
        ("tok{token}", "tok2001", True),
        ("tok{token}", "tok1999", False),
        ("ep{epoch}-ba{batch}-rank{rank}.pt", "ep2-ba21-rank0.pt", True),
        ("ep{epoch}-ba{batch}-rank{rank}.pt", "ep2-ba20-rank7.pt", False),
        ("{run_name}/ep{epoch}.pt", "mnist/ep3.pt", True),
        ("{run_name}-ep{epoch}.pt", "group/mnist-ep3.pt", True),
        ("w{world_size}-ep{epoch}.pt", "w1/w1-ep3.pt", False),
        ("ep{epoch}-b{batch_in_epoch}", "ep2-b8", True),
        ("ep{epoch}-b{batch_in_epoch}", "ep2-b7", False),
        ("ep{epoch}-b{batch_in_epoch}", "ep1-b8", False),
        ("ep{epoch}-b{sample_in_epoch}", "ep2-b71", True),
        ("ep{epoch}-b{token_in_epoch}", "ep2-b701", True),
        ("ep{epoch}/again{epoch}", "ep3/again3", True),
        ("ep{epoch}/again{epoch}", "ep3/again4", False),
        ("t{total_wct}-ep{epoch}", "t7200.0-ep2", False),
        ("ep{epoch:04d}", "ep0003", True),
    ],
)
def test_only_files_from_later_in_the_run_are_in_the_way(
    tmp_path: Path, filename: str, existing: str, is_conflict: bool
) -> None:
    path = tmp_path / existing
    path.parent.mkdir(exist_ok=True)
    path.touch()

    if is_conflict:
        with pytest.raises(FileExistsError, match="must not be newer than the run, but its"):
            ensure_folder_has_no_conflicting_files(tmp_path, filename, NOW)
    else:
        ensure_folder_has_no_conflicting_files(str(tmp_path), filename, NOW)


def test_a_count_in_the_epoch_needs_the_epoch_once_a_file_matches(tmp_path: Path) -> None:
    ensure_folder_has_no_conflicting_files(tmp_path, "b{batch_in_epoch}", NOW)
    (tmp_path / "b1").touch()

    with pytest.raises(ValueError, match=r"must also contain '\{epoch\}', because '\{batch_in_epoch\}' alone"):
        ensure_folder_has_no_conflicting_files(tmp_path, "b{batch_in_epoch}", NOW)


def test_a_missing_folder_has_no_conflicts(tmp_path: Path) -> None:
    ensure_folder_has_no_conflicting_files(tmp_path / "missing", "ep{epoch}", NOW)


def test_dist_is_read_when_a_name_is_made_not_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")

    assert "5" == format_name_with_dist("{rank}", "mnist")
    assert not dist.is_initialized()
