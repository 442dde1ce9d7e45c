"""Print the result of every session in nox reports; fail if one failed (standard library only).

python tools/ci_summary.py REPORT...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def summary(path: Path) -> tuple[list[str], list[str]]:
    """Return one line for each session of a report, and the names of the failed sessions."""
    if not path.is_file():
        return [], [f"{path.stem} (no session was run)"]
    lines, failures = [], []
    for session in json.loads(path.read_text(encoding="utf-8"))["sessions"]:
        arguments = ", ".join(map(str, session["args"].values()))
        name = f"{session['name']}({arguments})" if arguments else session["name"]
        reason = f"  {session['reason']}" if session["reason"] else ""
        lines.append(f"{session['result']:>8}  {session['duration']:6.1f} s  {name}{reason}")
        if session["result"] not in ("success", "skipped"):
            failures.append(name)
    return lines, failures


def main() -> None:
    failed = []
    for argument in sys.argv[1:]:
        lines, failures = summary(Path(argument))
        for line in lines:
            print(line)
        failed += failures
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
