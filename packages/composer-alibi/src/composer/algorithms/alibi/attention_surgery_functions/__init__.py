"""Policies that change the modules of a model for ALiBi, one for each class of modules.

Importing this imports the models of `transformers`.
"""

from composer.algorithms.alibi.attention_surgery_functions import policies
from composer.algorithms.alibi.attention_surgery_functions.attention import (
    check_attention as check_attention,
)
from composer.algorithms.alibi.attention_surgery_functions.attention import (
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

# Not in `policies`, so that importing that module alone changes nothing.
policies.register(policy_registry)
