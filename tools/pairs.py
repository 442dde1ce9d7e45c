"""Write which algorithms compose with which, from what they declare (all packages must be installed).

python -m tools.pairs            # write packages/composer-all/COMPOSITION.md, as `nox -s pairs` does
python -m tools.pairs --check    # fail if what is written is wrong
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from composer import algorithms
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import Algorithm, ConflictError
from composer.core.ordering import Ordering
from tools.workspace import Workspace

# For algorithms that cannot be made without.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Alibi": {"max_sequence_length": 256},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck"},
}
_HEAD = """# Which algorithms compose

Written by `nox -s pairs` from what the algorithms declare, each with its default arguments; do not edit. The
engine enforces it: it sorts, refuses or warns when it gets the algorithms, and `engine.explain()` says so for yours.
`tests/test_composition.py` trains every pair in both orders of listing and compares the weights.
"""


@dataclass(frozen=True)
class Pair:
    """What the engine makes of two algorithms.

    Attributes:
        first: The one that acts first, if it matters.
        second: The other one.
        refused: Why the engine refuses them; "" if it does not.
        ordered: Why `first` is first; "" if either order gives the same.
        discouraged: What the engine warns of; "" if nothing.
    """

    first: str
    second: str
    refused: str = ""
    ordered: str = ""
    discouraged: str = ""


def classes() -> list[type[Algorithm]]:
    """All installed algorithms, by name."""
    found = (getattr(algorithms, name) for name in sorted(algorithms.__all__))
    return [thing for thing in found if inspect.isclass(thing) and issubclass(thing, Algorithm)]


def make(cls: type[Algorithm]) -> Algorithm:
    """An algorithm with its default arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(**ARGUMENTS.get(cls.__name__, {}))


def judge(one: Algorithm, other: Algorithm) -> Pair:
    """What the engine makes of two algorithms."""
    names = type(one).__name__, type(other).__name__
    try:
        ordering = Ordering([one, other])
    except ConflictError as error:
        return Pair(*names, refused=str(error).partition(". Remove")[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotIntendedUseWarning)
        ordering.warn_discouraged()
    discouraged = str(caught[0].message).partition(". Remove")[0] if caught else ""
    i, j = ordering.forward
    ordered = ordering._edges[i].get(j, "")
    return Pair(names[i], names[j], ordered=ordered, discouraged=discouraged)


def pairs() -> list[Pair]:
    """Every pair of installed algorithms."""
    made = [make(cls) for cls in classes()]
    return [judge(one, other) for one, other in itertools.combinations(made, 2)]


def text_of(found: Sequence[Pair]) -> str:
    """The page."""
    refused = [pair for pair in found if pair.refused]
    ordered = [pair for pair in found if pair.ordered]
    discouraged = [pair for pair in found if pair.discouraged]
    free = len(found) - len(refused) - len(ordered)
    return "\n".join(
        (
            _HEAD,
            f"Of {len(found)} pairs of {len(classes())} algorithms, {free} compose in either order, {len(ordered)}\n"
            f"compose and are put in order, and {len(refused)} are refused. {len(discouraged)} get a warning.\n",
            "## Put in order\n",
            _table(("first", "then", "because"), ((p.first, p.second, p.ordered) for p in ordered)),
            "## Refused\n",
            _table(("algorithm", "and", "because"), ((p.first, p.second, p.refused) for p in refused)),
            "## Warned of\n",
            _table(("algorithm", "and", "because"), ((p.first, p.second, p.discouraged) for p in discouraged)),
        )
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *sorted(map(tuple, rows))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write which algorithms compose with which.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is not up to date")
    check: bool = parser.parse_args().check
    path, text = Workspace()["composer-all"].path / "COMPOSITION.md", text_of(pairs())
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    if check:
        sys.exit(f"{path.name} is not what the algorithms declare. Run `nox -s pairs`.")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
