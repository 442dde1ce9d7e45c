"""The tables of variables in names of files."""

from __future__ import annotations

from composer.utils import file_helpers


def test_the_tables_list_every_variable() -> None:
    of_dist = {"run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank"}
    counts = {"epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"}
    of_time = {*of_dist, *counts, "total_wct", "epoch_wct", "batch_wct"}

    for table, names in (
        (file_helpers.FORMAT_NAME_WITH_DIST_TABLE, of_dist),
        (file_helpers.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE, of_time),
    ):
        lines = table.splitlines()
        assert {f"``{{{name}}}``" for name in names} == {line.split("|")[1].strip() for line in lines[3::2]}
        assert 1 == len({len(line) for line in lines})
        assert {"+"} == {line[0] for line in lines[::2]}
        assert {"+", "="} == set(lines[2])
