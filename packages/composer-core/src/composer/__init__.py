"""Composer: train PyTorch models with small, composable, published methods.

Importing this package reads no entry points and imports neither torchvision nor torchmetrics. Names of other
distributions are looked up on first use.
"""

from __future__ import annotations

import os
import sys
import warnings
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

from composer.core._registry import missing_error
from composer.utils.import_helpers import import_from_distribution as moved

if TYPE_CHECKING:
    from composer.core import Algorithm as Algorithm
    from composer.core import Callback as Callback
    from composer.core import DataSpec as DataSpec
    from composer.core import Engine as Engine
    from composer.core import Evaluator as Evaluator
    from composer.core import Event as Event
    from composer.core import State as State
    from composer.core import Time as Time
    from composer.core import Timestamp as Timestamp
    from composer.core import TimeUnit as TimeUnit
    from composer.loggers import Logger as Logger
    from composer.models import ComposerModel as ComposerModel
    from composer.trainer import Trainer as Trainer

    __version__: str
    """The version of composer-core."""

_CORE = "composer-core"
_LAZY_NAMES = {  # name -> its module, and the distribution that provides it
    **dict.fromkeys(
        "Algorithm Callback DataSpec Engine Evaluator Event State Time Timestamp TimeUnit".split(),
        ("composer.core", _CORE),
    ),
    "Logger": ("composer.loggers", _CORE),
    "ComposerModel": ("composer.models", _CORE),
    "Trainer": ("composer.trainer", "composer-trainer"),
}
_PARTS = {
    **dict.fromkeys(
        "algorithms callbacks core datasets devices functional hosts loggers loss models testing utils".split(), _CORE
    ),
    "cli": "composer-launcher",
    "inference": "composer-export",
    **dict.fromkeys("distributed trainer".split(), "composer-trainer"),
    **{name: f"composer-{name}" for name in "checkpoint metrics optim profiler recipes".split()},
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _public()  # `from composer import *` imports what is installed
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version(_CORE)
    elif name in _LAZY_NAMES:
        module, distribution = _LAZY_NAMES[name]
        value = moved(module, name, distribution, f"composer.{name}", missing_error(sys._getframe(1)))
    elif name in _PARTS:
        value = moved(f"composer.{name}", "", _PARTS[name], f"composer.{name}", missing_error(sys._getframe(1)))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    parts = [name for name in _PARTS if _is_installed(f"composer.{name}")]
    return sorted({*_public(), *parts, *(name for name in globals() if name.startswith("__"))})


def _public() -> list[str]:
    return [name for name, (module, _) in _LAZY_NAMES.items() if _is_installed(module)] + ["__version__"]


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _warn_of_other_owners() -> None:
    """Warn if a distribution is installed whose files have the names of these, such as MosaicML's Composer."""
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
