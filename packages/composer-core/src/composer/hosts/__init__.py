"""Adapters that bring algorithms into the training loops of other libraries, looked up by name.

A name works if the package that registers it is installed; otherwise the error names that package. For a loop written
by hand, `composer.loop.HostedRun` is enough.
"""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories
__getattr__, __dir__ = lazy_namespace("composer.hosts", globals())
