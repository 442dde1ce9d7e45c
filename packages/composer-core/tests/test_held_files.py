import os

import pytest

from composer.loggers._held_files import hold_file, release_file


@pytest.mark.parametrize("links", [True, False])
def test_a_held_file_outlives_its_own_name(tmp_path, monkeypatch, links):
    def no_links(*_):
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "rank0.pt"
    path.write_bytes(b"weights")
    held = hold_file(path, "other.pt")
    path.unlink()
    assert held.name == "other.pt"
    assert held.read_bytes() == b"weights"
    release_file(held)
    assert list(tmp_path.iterdir()) == []
    release_file(held)


def test_of_a_link_what_it_leads_to_is_held(tmp_path):
    (tmp_path / "ep1.pt").write_bytes(b"weights")
    (tmp_path / "latest.pt").symlink_to("ep1.pt")
    held = hold_file(tmp_path / "latest.pt", "latest.pt")
    assert held.read_bytes() == b"weights"
    release_file(held)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ep1.pt", "latest.pt"]
