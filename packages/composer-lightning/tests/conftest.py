"""Lightning warns of few workers and of small data; tests have both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from lightning.fabric.utilities.warnings import PossibleUserWarning


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|pkg_resources).*")
        yield
