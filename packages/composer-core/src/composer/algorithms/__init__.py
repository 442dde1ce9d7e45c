"""Training algorithms, looked up by name in the installed packages.

A name works if the package that registers it is installed; otherwise the error names that package.
"""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories
__getattr__, __dir__ = lazy_namespace("composer.algorithms", globals(), listed=True)
