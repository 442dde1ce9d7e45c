"""Run benchmarks: `nox -s bench` all of them, `nox -s bench -- overhead --rounds 21` one with its options."""

from __future__ import annotations

import importlib
import sys

_BENCHMARKS = (
    "overhead",
    "hosts",
    "imports",
    "algorithms",
    "loaders",
    "images",
    "characters",
    "cooldown",
    "packing",
    "cross_entropy",
    "record",
    "gpu",
)


def main(arguments: list[str]) -> int:
    """Run the benchmark named first, or all of them."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: nox -s bench [-- {{{','.join(_BENCHMARKS)}}} [options]]")
        for name in _BENCHMARKS:
            print(f"  {name:13} {importlib.import_module(f'tools.bench.{name}').__doc__}")
        return 0
    if arguments and arguments[0] not in _BENCHMARKS:
        print(f"The benchmark must be one of {', '.join(_BENCHMARKS)}, got {arguments[0]!r}.", file=sys.stderr)
        return 2
    for name in arguments[:1] or _BENCHMARKS:
        print(f"== {name}")
        importlib.import_module(f"tools.bench.{name}").main(arguments[1:])
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
