"""The pure functions behind the algorithms, for use in any training loop.

A name works if the package that registers it is installed; otherwise the error names that package.
"""

from composer.core._registry import lazy_namespace

__getattr__, __dir__ = lazy_namespace("composer.functional", globals())
