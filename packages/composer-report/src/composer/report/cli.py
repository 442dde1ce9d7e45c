"""The command `composer-report`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from composer.report._html import count, size
from composer.report._page import write_page
from composer.report._read import RunNotFoundError, find_runs, read_run

_DESCRIPTION = (
    "Write one HTML page about a recorded training run, or one that compares several. The page needs no network."
)


def _seconds(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: The command line without the command's name. None: that of this process.
    """
    parser = argparse.ArgumentParser(prog="composer-report", description=_DESCRIPTION)
    parser.add_argument(
        "folders", nargs="+", metavar="RUN_FOLDER", help="the folder of a run, or one that holds folders of runs"
    )
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: %(default)s)")
    parser.add_argument(
        "--watch",
        type=_seconds,
        metavar="SECONDS",
        help="write the page again and again, and let the browser load it again, while a run is unfinished",
    )
    chosen = parser.parse_args(arguments)
    if chosen.watch:
        print(f"{chosen.output} is written every {chosen.watch} s until all runs have ended, or Ctrl-C.", flush=True)
    try:
        while True:
            runs = [read_run(folder) for folder in find_runs(chosen.folders)]
            goes_on = chosen.watch and any(run.status == "unfinished" for run in runs)
            path = write_page(runs, chosen.output, refresh=chosen.watch if goes_on else 0)
            if not goes_on:
                break
            time.sleep(chosen.watch)
    except KeyboardInterrupt:
        runs = [read_run(folder) for folder in find_runs(chosen.folders)]
        path = write_page(runs, chosen.output)
    except (RunNotFoundError, OSError, ValueError) as error:
        print(f"composer-report: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{path} ({size(path.stat().st_size)}): {count(len(runs), 'run')}")
