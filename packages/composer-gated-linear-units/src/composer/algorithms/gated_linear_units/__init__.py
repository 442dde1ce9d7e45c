"""GatedLinearUnits: gate the feed-forward layers of BERT."""

from composer.algorithms.gated_linear_units.gated_linear_unit_layers import BERTGatedFFOutput as BERTGatedFFOutput
from composer.algorithms.gated_linear_units.gated_linear_units import GatedLinearUnits as GatedLinearUnits
from composer.algorithms.gated_linear_units.gated_linear_units import (
    apply_gated_linear_units as apply_gated_linear_units,
)
from composer.algorithms.gated_linear_units.gated_linear_units import from_BertIntermediate as from_BertIntermediate
from composer.algorithms.gated_linear_units.gated_linear_units import from_BertOutput as from_BertOutput

__all__ = [
    "BERTGatedFFOutput",
    "GatedLinearUnits",
    "apply_gated_linear_units",
    "from_BertIntermediate",
    "from_BertOutput",
]
