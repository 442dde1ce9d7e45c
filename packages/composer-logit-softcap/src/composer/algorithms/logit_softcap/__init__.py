"""LogitSoftcap: bound logits smoothly with a hyperbolic tangent."""

from composer.algorithms.logit_softcap.logit_softcap import LogitSoftcap as LogitSoftcap
from composer.algorithms.logit_softcap.logit_softcap import apply_logit_softcap as apply_logit_softcap
from composer.algorithms.logit_softcap.logit_softcap import softcap_logits as softcap_logits

__all__ = ["LogitSoftcap", "apply_logit_softcap", "softcap_logits"]
