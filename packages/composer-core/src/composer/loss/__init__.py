"""Loss functions for class targets, given as indices or as probabilities. Names are imported on first use."""

from pkgutil import extend_path

from composer.core._registry import lazy_namespace

__path__ = extend_path(__path__, __name__)  # editable installs keep the parts in different directories

_OWN = {"loss": "binary_cross_entropy_with_logits loss_registry soft_cross_entropy"}
__getattr__, __dir__ = lazy_namespace("composer.loss", globals(), _OWN)
