"""Callbacks, looked up by name from whatever is installed.

A name works exactly when the package that registers it is installed; a missing one says which package that is.
"""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories
__getattr__, __dir__ = lazy_namespace("composer.callbacks", globals())
