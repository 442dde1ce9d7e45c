"""Merge traces into one timeline: `python -m composer.profiler.json_trace_merger -o OUT FILES...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from composer.profiler._traces import merge_traces

__all__ = ["main", "merge_traces"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: The command-line arguments; None reads those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m composer.profiler.json_trace_merger",
        description="Merge traces of several ranks into one, which ui.perfetto.dev and chrome://tracing can open.",
    )
    parser.add_argument("-o", "--output", required=True, help="the file to write")
    parser.add_argument("files", nargs="+", help="the traces; compressed if they end in .gz")
    options = parser.parse_args(arguments)
    try:
        merge_traces(options.output, *options.files)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
