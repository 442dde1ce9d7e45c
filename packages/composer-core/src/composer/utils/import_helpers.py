"""Import objects by name, and report missing optional dependencies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from composer.core import _registry

load_registered = _registry.load  # for other distributions, which must not import a private module


class MissingConditionalImportError(ImportError):
    """An optional dependency is not installed.

    Args:
        extra_deps_group: The pip extra with the dependency.
        conda_package: The conda package of the dependency; None if there is none.
        conda_channel: The channel of that package.
    """

    def __init__(
        self, extra_deps_group: str, conda_package: str | None, conda_channel: str | None = "conda-forge"
    ) -> None:
        if conda_package is None:
            advice = f"Install the pip extra {extra_deps_group!r}."
        else:
            channel = "" if conda_channel is None else f"-c {conda_channel} "
            advice = f"Run `pip install {conda_package}` or `conda install {channel}{conda_package}`."
        super().__init__(f"The optional dependencies {extra_deps_group!r} are not installed. {advice}")


def import_object(name: str) -> Any:
    """Import an object by its path.

    Args:
        name: `"module:object"`, where both may be dotted.

    Raises:
        ValueError: `name` has another form.

    Example:
        >>> import_object("collections:OrderedDict.fromkeys")("ab")
        OrderedDict([('a', None), ('b', None)])
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(f"`name` must have the form 'module:object', got {name!r}.")
    obj: Any = import_module(module)
    for attribute in path.split("."):
        obj = getattr(obj, attribute)
    return obj


def import_from_distribution(
    module: str,
    attribute: str,
    distribution: str,
    public: str,
    missing: type[ImportError | AttributeError] = ModuleNotFoundError,
) -> Any:
    """Import an object of another distribution of this project; if that is missing, say how to install it.

    Args:
        module: The module that defines the object.
        attribute: The object's name there, or "" for the module itself.
        distribution: The distribution that ships `module`.
        public: The public name of the object, for the message.
        missing: The error to raise if `distribution` is not installed.

    Raises:
        ImportError: `missing`, unless that is an AttributeError.

    Example:
        >>> import_from_distribution("composer.core", "Event", "composer-core", "composer.Event").INIT
        <Event.INIT: 'init'>
    """
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        # A missing parent package (`composer.x` for `composer.x.y`) means the same as a missing module.
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise missing(
            f"`{public}` is part of `{distribution}`, which is not installed. Run `pip install {distribution}`.",
            name=error.name,
        ) from None
    return getattr(found, attribute) if attribute else found
