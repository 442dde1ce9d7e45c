"""Resolve every entry point and console script of the given installed distributions (standard library only).

python tools/check_installed.py composer-core composer-mixup
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution


def resolve(name: str) -> list[str]:
    """Load all entry points of a distribution; return one sentence for each problem."""
    problems = []
    points = distribution(name).entry_points
    for point in points:
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            problems.append(f"{name}: `{point.name}` of `{point.group}` does not resolve to `{point.value}`: {error}")
            continue
        if point.group == "console_scripts" and not callable(loaded):
            problems.append(f"{name}: the command `{point.name}` must be callable, got {loaded!r}")
    print(f"{name}: {len(points)} entry points")
    return problems


def main() -> None:
    problems = [problem for name in sys.argv[1:] for problem in resolve(name)]
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
