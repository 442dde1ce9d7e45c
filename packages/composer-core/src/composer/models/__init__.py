"""`ComposerModel`, the base class of models, and models, looked up by name in the installed packages.

A name works if the package that registers it is installed; otherwise the error names that package.
"""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories
_OWN = {"base": "ComposerModel"}
__getattr__, __dir__ = lazy_namespace("composer.models", globals(), _OWN)
