"""How ALiBi changes the modules of a model: one policy for each class of modules.

Importing this imports the models of `transformers`.
"""

from composer.algorithms.alibi.attention_surgery_functions import _bert, _gpt2
from composer.algorithms.alibi.attention_surgery_functions._attention import (
    check_attention as check_attention,
)
from composer.algorithms.alibi.attention_surgery_functions._attention import (
    share_biases as share_biases,
)
from composer.algorithms.alibi.attention_surgery_functions.utils import (
    AlibiReplacementFunction as AlibiReplacementFunction,
)
from composer.algorithms.alibi.attention_surgery_functions.utils import PolicyRegistry as PolicyRegistry
from composer.algorithms.alibi.attention_surgery_functions.utils import policy_registry as policy_registry
from composer.algorithms.alibi.attention_surgery_functions.utils import register_alibi as register_alibi
from composer.algorithms.alibi.attention_surgery_functions.utils import (
    zero_and_freeze_expand_position_embeddings as zero_and_freeze_expand_position_embeddings,
)

__all__ = [
    "AlibiReplacementFunction",
    "PolicyRegistry",
    "check_attention",
    "policy_registry",
    "register_alibi",
    "share_biases",
    "zero_and_freeze_expand_position_embeddings",
]

# Here rather than in those modules, so that importing them changes nothing.
_bert.register(policy_registry)
_gpt2.register(policy_registry)
