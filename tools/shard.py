"""A plugin of pytest: `python -m pytest -p tools.shard --shard 2/3` runs the second third of the tests."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add the option."""
    parser.addoption("--shard", type=_shard, metavar="INDEX/COUNT", help="run only this part of the tests")


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ArgumentTypeError(f"must be <index>/<count>, with an index from 1 to the count, got {text!r}")
    return int(index), int(count)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep every count-th test, so that long files are spread over the parts."""
    if config.option.shard is None:
        return
    index, count = config.option.shard
    kept = items[index - 1 :: count]
    config.hook.pytest_deselected(items=[item for number, item in enumerate(items) if number % count != index - 1])
    items[:] = kept
