"""Models, and the base class that ties one to its loss and metrics.

Apart from that class a name works exactly when the package that registers it is installed; a missing one says which
package that is.
"""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace
from composer.models.base import ComposerModel as ComposerModel

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories
_OWN = ("ComposerModel",)
__getattr__, __dir__ = lazy_namespace("composer.models", globals())
