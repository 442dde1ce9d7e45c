"""Tables of the variables in names of files, which MosaicML's Composer puts into its documentation."""

from __future__ import annotations


def _table(rows: list[tuple[str, str]]) -> str:
    """Return a reStructuredText table of format variables."""
    rows = [("Variable", "Description"), *((f"``{{{name}}}``", meaning) for name, meaning in rows)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    lines = [rule]
    for index, row in enumerate(rows):
        cells = [f" {cell.ljust(width)} " for cell, width in zip(row, widths, strict=True)]
        lines += ["|".join(["", *cells, ""]), rule.replace("-", "=") if index == 0 else rule]
    return "\n".join(lines)


_DIST_ROWS = [
    ("run_name", "The name of the training run."),
    ("rank", "The global rank: the index of this process among all."),
    ("local_rank", "The local rank: the index of this process on its node."),
    ("world_size", "The number of processes."),
    ("local_world_size", "The number of processes on this node."),
    ("node_rank", "The node rank: the index of this node."),
]
_TIME_ROWS = [
    ("epoch", "The number of epochs trained."),
    ("batch", "The number of batches trained."),
    ("batch_in_epoch", "The number of batches trained in this epoch."),
    ("sample", "The number of samples trained."),
    ("sample_in_epoch", "The number of samples trained in this epoch."),
    ("token", "The number of tokens trained."),
    ("token_in_epoch", "The number of tokens trained in this epoch."),
    ("total_wct", "The seconds of training."),
    ("epoch_wct", "The seconds of training in this epoch."),
    ("batch_wct", "The seconds the last batch took."),
]

FORMAT_NAME_WITH_DIST_TABLE = _table(_DIST_ROWS)
"""The variables of `format_name_with_dist`, as a reStructuredText table for documentation."""

FORMAT_NAME_WITH_DIST_AND_TIME_TABLE = _table(_DIST_ROWS + _TIME_ROWS)
"""The variables of `format_name_with_dist_and_time`, as a reStructuredText table for documentation."""
