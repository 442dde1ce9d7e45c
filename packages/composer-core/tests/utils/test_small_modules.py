"""Modules too small for a file of tests each: imports by name, warnings."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import pytest

from composer.utils import (
    MissingConditionalImportError,
    VersionedDeprecationWarning,
    import_object,
)

# ---- import_helpers


def test_objects_are_imported_by_path() -> None:
    assert import_object("collections:OrderedDict") is collections.OrderedDict
    assert "join" == import_object("os.path:join.__name__")


@pytest.mark.parametrize("name", ["collections", "collections:", ":OrderedDict", "collections.OrderedDict"])
def test_a_path_without_module_and_object_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`name` must have the form 'module:object', got '{name}'"):
        import_object(name)


def test_a_wrong_path_names_the_missing_attribute() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_object("no_such_module:x")
    with pytest.raises(AttributeError, match="no_such_name"):
        import_object("collections:no_such_name")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("nlp", "transformers"), "`pip install transformers` or `conda install -c conda-forge transformers`"),
        (("nlp", "transformers", None), "`pip install transformers` or `conda install transformers`"),
        (("nlp", None), "Install the pip extra 'nlp'"),
    ],
)
def test_a_missing_dependency_gives_the_command_to_install_it(args: tuple[Any, ...], expected: str) -> None:
    error = MissingConditionalImportError(*args)

    assert isinstance(error, ImportError)
    assert str(error).startswith("The optional dependencies 'nlp' are not installed.")
    assert expected in str(error)


# ---- warnings


def test_a_deprecation_names_the_version_that_removes_it() -> None:
    with pytest.warns(VersionedDeprecationWarning, match=r"Use b\. It will be removed in version 1\.0\."):
        warnings.warn(VersionedDeprecationWarning("Use b.", remove_version="1.0"), stacklevel=2)
