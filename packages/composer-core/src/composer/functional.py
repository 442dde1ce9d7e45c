"""The pure functions behind the algorithms, for use in any training loop.

A name works exactly when the package that registers it is installed; a missing one says which package that is.
"""

from composer.core._registry import lazy_namespace

__getattr__, __dir__ = lazy_namespace("composer.functional", globals())
