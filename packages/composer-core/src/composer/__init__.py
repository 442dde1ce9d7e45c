"""Composer: train PyTorch models with small, composable, published methods.

Importing this package reads no entry points and imports neither torchvision nor torchmetrics. Names of other
distributions are looked up on first use.
"""

from __future__ import annotations

import os
import sys
import warnings
from pkgutil import extend_path
from typing import Any

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

__version__: str
"""The version of composer-core."""

_CORE = "composer-core"
_OWN = {  # the names of each part
    "core": "Algorithm Callback Engine Event State Time TimeUnit Timestamp",
    "core.data_spec": "DataSpec",
    "core.evaluator": "Evaluator",
    "loggers": "Logger",
    "models": "ComposerModel",
    "trainer": "Trainer",
}
_PART_OF = {name: part for part, names in _OWN.items() for name in names.split()}
_PARTS = {
    **dict.fromkeys(
        "algorithms callbacks core datasets devices functional hosts loggers loss models testing utils".split(), _CORE
    ),
    "cli": "composer-launcher",
    **dict.fromkeys("export inference".split(), "composer-export"),
    **dict.fromkeys("distributed trainer".split(), "composer-trainer"),
    **{name: f"composer-{name}" for name in "checkpoint metrics optim profiler recipes".split()},
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _public()  # `from composer import *` imports what is installed
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version(_CORE)
    elif name in _PART_OF or name in _PARTS:
        from composer.core._registry import missing_error
        from composer.utils.import_helpers import import_from_distribution

        part, attribute = (_PART_OF[name], name) if name in _PART_OF else (name, "")
        distribution = _PARTS.get(part, "composer-loop")
        missing = missing_error(sys._getframe(1))
        value = import_from_distribution(f"composer.{part}", attribute, distribution, f"composer.{name}", missing)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    parts = [name for name in _PARTS if _is_installed(f"composer.{name}")]
    return sorted({*_public(), *parts, *(name for name in globals() if name.startswith("__"))})


def _public() -> list[str]:
    return [name for name, part in _PART_OF.items() if _is_installed(f"composer.{part}")] + ["__version__"]


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _warn_of_other_owners() -> None:
    """Warn if another distribution with files of the same names is installed, such as MosaicML's Composer."""
    folders = {folder for folder in map(os.path.dirname, __path__) if folder.endswith("-packages")}
    # Listing a folder takes a fraction of a millisecond; `importlib.metadata` would double the time of this import.
    names = sorted({name for folder in folders for name in os.listdir(folder) if name.endswith(".dist-info")})
    own = [name.removesuffix(".dist-info").replace("-", "==") for name in names if name.startswith("composer_")]
    for other in {"composer", "mosaicml"}.intersection(name.partition("-")[0] for name in names):
        warnings.warn(
            f"`{other}` must not be installed beside `composer-core`: they have files of the same names, and "
            f"uninstalling one removes files of the other. Run `pip uninstall -y {other}`, and then `pip install "
            f"--force-reinstall --no-deps {' '.join(own).replace('_', '-')}`.",
            RuntimeWarning,
            stacklevel=3,
        )


_warn_of_other_owners()
