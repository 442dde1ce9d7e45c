"""Saving and loading a `State`.

- `layout`: which key of a saved state holds what.
- `optimizers`, `metrics`: their states, keyed by names instead of numbers.
- `required`: applies, before a model is loaded, the algorithms that changed its layers; `rebuild` makes them from their
  saved `repr`.
"""

from composer.core._registry import required_on_load as required_on_load
from composer.core.saving.layout import upgrade_state_dict as upgrade_state_dict
from composer.core.saving.required import add_required_algorithms as add_required_algorithms

__all__ = ["add_required_algorithms", "required_on_load", "upgrade_state_dict"]
