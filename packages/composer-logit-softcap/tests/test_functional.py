"""`softcap_logits` and `apply_logit_softcap` against the formula and the attention of Gemma 2."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from composer import functional as cf
from composer.algorithms.logit_softcap import apply_logit_softcap, softcap_logits
from composer.algorithms.warnings import NoEffectWarning
from composer.utils import MissingConditionalImportError

TOKENS = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(3))
PADDED = torch.ones(2, 10, dtype=torch.int64)
PADDED[0, :3] = 0
NAMES = ["llama", "qwen2", "gpt2"]
MODULES = {"llama": modeling_llama, "qwen2": modeling_qwen2, "gpt2": modeling_gpt2}


def make_model(name: str, implementation: str = "eager", **options: Any) -> Any:
    """A model with weights large enough for its scores and logits to be far from 0."""
    torch.manual_seed(0)
    if name == "gpt2":
        options = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 0, **options}
        config: Any = GPT2Config(vocab_size=32, eos_token_id=None, attn_implementation=implementation, **options)
        model: Any = GPT2LMHeadModel(config)
    else:
        kinds = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            "gemma2": (Gemma2Config, Gemma2ForCausalLM),
        }
        config = kinds[name][0](
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=None,
            pad_token_id=0,
            attn_implementation=implementation,
            **options,
        )
        model = kinds[name][1](config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)
    return model.eval()


def logits_of(model: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    logits: torch.Tensor = model(TOKENS, attention_mask=mask, use_cache=False).logits
    return logits if mask is None else logits[mask.bool()]


def test_the_functions_are_registered() -> None:
    assert softcap_logits is cf.softcap_logits
    assert apply_logit_softcap is cf.apply_logit_softcap


@settings(deadline=None)
@given(x=st.floats(-1e6, 1e6), cap=st.floats(0.1, 100))
def test_logits_are_bounded_and_keep_sign_and_order(x: float, cap: float) -> None:
    logits = torch.tensor([x, x + 1], dtype=torch.float64)
    actual = softcap_logits(logits, cap)

    torch.testing.assert_close(cap * torch.tanh(logits / cap), actual)
    assert float(actual.abs().max()) <= cap * (1 + 1e-15)
    assert float(actual[0]) * x >= 0
    assert actual[0] <= actual[1]


def test_the_slope_at_zero_is_one() -> None:
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    softcap_logits(logits, 0.5).sum().backward()

    assert torch.equal(torch.ones(3, dtype=torch.float64), logits.grad)  # type: ignore[arg-type]


def test_a_very_large_cap_changes_nothing() -> None:
    logits = 30 * torch.randn(100, dtype=torch.float64)

    torch.testing.assert_close(logits, softcap_logits(logits, 1e6), rtol=1e-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    logits = 30 * torch.randn(100).to(dtype)

    assert torch.equal(softcap_logits(logits.float(), 7.0).to(dtype), softcap_logits(logits, 7.0))


@pytest.mark.parametrize("name", NAMES)
def test_the_final_logits_are_capped_also_in_the_loss(name: str) -> None:
    model = make_model(name)
    expected = softcap_logits(logits_of(model), 2.0)
    names = list(model.state_dict())
    assert logits_of(model).abs().max() > 2
    apply_logit_softcap(model, final=2.0)
    outputs = model(TOKENS, labels=TOKENS)

    torch.testing.assert_close(expected, outputs.logits)
    reference = nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(reference, outputs.loss)
    assert names == list(model.state_dict())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", [None, PADDED])
@pytest.mark.parametrize("name", NAMES)
def test_a_very_large_cap_of_attention_changes_nothing(
    name: str, mask: torch.Tensor | None, implementation: str
) -> None:
    model = make_model(name, implementation)
    expected = logits_of(model, mask)
    apply_logit_softcap(model, final=None, attention=1e6)

    torch.testing.assert_close(expected, logits_of(model, mask), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", [None, PADDED])
@pytest.mark.parametrize("name", NAMES)
def test_capped_attention_is_that_of_gemma(
    name: str, mask: torch.Tensor | None, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and gradients; the reference is the model with the eager function of Gemma."""
    reference, model = make_model(name), make_model(name, implementation)
    uncapped = logits_of(reference, mask)
    if name == "gpt2":
        for layer in reference.transformer.h:
            layer.attn.num_key_value_groups = 1

    def capped(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return modeling_gemma2.eager_attention_forward(
            module, query, key, value, attention_mask, scaling=kwargs["scaling"], softcap=0.5
        )

    monkeypatch.setattr(MODULES[name], "eager_attention_forward", capped)
    expected = logits_of(reference, mask)
    apply_logit_softcap(model, final=None, attention=0.5)

    actual = logits_of(model, mask)
    torch.testing.assert_close(expected, actual, rtol=1e-4, atol=1e-4)
    expected.sin().sum().backward()
    actual.sin().sum().backward()
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        scale = one.grad.abs().max()
        torch.testing.assert_close(one.grad / scale, other.grad / scale, rtol=1e-3, atol=1e-3)
    assert (uncapped - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_equals_that_without(name: str) -> None:
    model = make_model(name, "sdpa")
    apply_logit_softcap(model, final=2.0, attention=0.5)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(TOKENS), "pad_token_id": 0}

    for kind in ({}, {"cache_implementation": "static"}):
        cached = model.generate(TOKENS, **options, **kind)
        assert torch.equal(model.generate(TOKENS, **options, use_cache=False), cached)


def test_a_second_call_changes_the_caps() -> None:
    once, twice = make_model("llama"), make_model("llama")
    apply_logit_softcap(once, final=3.0, attention=0.5)
    apply_logit_softcap(twice, final=2.0, attention=0.7)
    apply_logit_softcap(twice, final=3.0, attention=0.5)

    assert torch.equal(logits_of(once), logits_of(twice))


def test_copies_and_pickles_are_capped_and_other_models_are_not() -> None:
    model, other = make_model("llama"), make_model("llama")
    plain = logits_of(other)
    apply_logit_softcap(model, final=2.0, attention=0.5)
    expected = logits_of(model)
    copied = copy.deepcopy(model)
    apply_logit_softcap(model, final=5.0, attention=5.0)

    assert torch.equal(expected, logits_of(copied))
    assert torch.equal(expected, logits_of(pickle.loads(pickle.dumps(copied))))
    assert torch.equal(plain, logits_of(other))


def test_the_head_of_other_models_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3)))
    x = 10 * torch.randn(5, 4)
    expected = softcap_logits(model(x), 0.5)
    apply_logit_softcap(model, final=0.5, head_name="1.0")

    torch.testing.assert_close(expected, model(x))
    with pytest.raises(AttributeError, match=r"`head_name` must be a name in .*, got 'head'.*no attribute `head`"):
        apply_logit_softcap(model, head_name="head")
    with pytest.raises(AttributeError, match=r"got 'lm_head'.* Use 'model.lm_head'"):
        apply_logit_softcap(nn.ModuleDict({"model": nn.ModuleDict({"lm_head": nn.Linear(4, 3)})}), head_name="lm_head")


def test_models_without_head_or_attention_are_warned_of() -> None:
    with pytest.warns(NoEffectWarning, match=r"the model has no head, whose name can be passed as `head_name`, and no"):
        apply_logit_softcap(nn.Linear(2, 2), attention=1.0)


def test_models_that_cap_already_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`final` must be None for .* `final_logit_softcapping=30.0`"):
        apply_logit_softcap(make_model("gemma2"))
    with pytest.raises(ValueError, match=r"`attention` must be None for .* `attn_logit_softcapping=50.0`"):
        apply_logit_softcap(make_model("gemma2"), final=None, attention=1.0)


def test_other_attention_is_refused_and_nothing_is_changed() -> None:
    model = make_model("llama", "flex_attention")
    with pytest.raises(ValueError, match=r"needs a model with attention 'eager' or 'sdpa', got 'flex"):
        apply_logit_softcap(model, attention=1.0)
    assert not list(model.lm_head.children())
    model = make_model("llama")
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"attention sinks of `LlamaAttention`"):
        apply_logit_softcap(model, attention=1.0)


def test_transformers_must_be_installed_to_cap_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)
    with pytest.raises(MissingConditionalImportError, match=r"pip install transformers"):
        apply_logit_softcap(model, attention=1.0)


@pytest.mark.parametrize("cap", [0, -1.0])
def test_caps_must_be_above_zero(cap: float) -> None:
    with pytest.raises(ValueError, match=rf"`cap` must be above 0, got {cap}"):
        softcap_logits(torch.zeros(2), cap)
    with pytest.raises(ValueError, match=rf"`attention` must be above 0, got {cap}"):
        apply_logit_softcap(nn.Linear(2, 2), attention=cap)
