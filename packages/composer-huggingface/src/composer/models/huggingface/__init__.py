"""Models of `transformers` as `ComposerModel`s, and conversion of their checkpoints back to `transformers`."""

from composer.models.huggingface._checkpoint import (
    write_huggingface_pretrained_from_composer_checkpoint as write_huggingface_pretrained_from_composer_checkpoint,
)
from composer.models.huggingface._metadata import (
    get_hf_config_from_composer_state_dict as get_hf_config_from_composer_state_dict,
)
from composer.models.huggingface._metadata import (
    get_peft_config_from_composer_state_dict as get_peft_config_from_composer_state_dict,
)
from composer.models.huggingface._model import HuggingFaceModel as HuggingFaceModel
from composer.models.huggingface._model import wrap_model as wrap_model
from composer.models.huggingface._peft import filter_state_dict_peft as filter_state_dict_peft
from composer.models.huggingface._peft import maybe_get_underlying_model as maybe_get_underlying_model
from composer.models.huggingface._peft import peft_filter_state_dict_trainable as peft_filter_state_dict_trainable
from composer.models.huggingface._peft import peft_installed as peft_installed

__all__ = [
    "HuggingFaceModel",
    "filter_state_dict_peft",
    "get_hf_config_from_composer_state_dict",
    "get_peft_config_from_composer_state_dict",
    "maybe_get_underlying_model",
    "peft_filter_state_dict_trainable",
    "peft_installed",
    "wrap_model",
    "write_huggingface_pretrained_from_composer_checkpoint",
]
