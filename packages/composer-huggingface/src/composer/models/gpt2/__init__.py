"""GPT-2: causal language modeling."""

from composer.models.gpt2.model import create_gpt2 as create_gpt2

__all__ = ["create_gpt2"]
