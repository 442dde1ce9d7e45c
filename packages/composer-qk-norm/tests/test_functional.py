"""`apply_qk_norm` against Qwen3, which has these norms, and against the formula."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from composer import functional as cf
from composer.algorithms.qk_norm import HeadNorm, apply_qk_norm
from composer.algorithms.warnings import NoEffectWarning
from composer.testing import SimpleTransformerModel

TOKENS = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(3))
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
}


def make_llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).eval()  # type: ignore[arg-type]


def make_gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=None, **options
    )
    return GPT2LMHeadModel(config).eval()


def slow_norm(x: torch.Tensor, gain: torch.Tensor, kind: str) -> torch.Tensor:
    """One head of one position after the other."""
    rows = []
    for row in x.reshape(-1, len(gain)):
        values = row - row.mean() if kind == "layer" else row
        rows.append(gain * values / (values.pow(2).sum() / len(gain) + 1e-6).sqrt())
    return torch.stack(rows).view_as(x)


def test_the_function_is_registered() -> None:
    assert apply_qk_norm is cf.apply_qk_norm


@settings(deadline=None)
@given(heads=st.integers(1, 3), size=st.integers(1, 5), kind=st.sampled_from(["rms", "layer"]), seed=st.integers(0, 99))
def test_each_head_is_normalized(heads: int, size: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, heads * size, generator=generator, dtype=torch.float64)
    norm = HeadNorm(size, kind).double()
    norm.weight.data = torch.randn(size, generator=generator, dtype=torch.float64)

    torch.testing.assert_close(slow_norm(x, norm.weight, kind), norm(x))


def test_the_kinds_are_those_of_torch() -> None:
    x = torch.randn(4, 8)

    torch.testing.assert_close(F.rms_norm(x, (8,), eps=1e-6), HeadNorm(8)(x))
    torch.testing.assert_close(F.layer_norm(x, (8,), eps=1e-6), HeadNorm(8, "layer")(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_normalized_in_float32(dtype: torch.dtype) -> None:
    """The square of 1000 is infinite in fp16."""
    x = torch.full((2, 8), 1000.0, dtype=dtype)
    actual = HeadNorm(4).to(dtype)(x)

    assert torch.equal(torch.ones(2, 8, dtype=dtype), actual)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_llama_becomes_qwen3(implementation: str) -> None:
    """Equal in every bit, also in generation with a cache, with the same names of parameters."""
    llama = make_llama(attn_implementation=implementation)
    qwen = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4, attn_implementation=implementation)).eval()  # type: ignore[arg-type]
    assert 2 == apply_qk_norm(llama)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in llama.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data = torch.randn(4, generator=generator)
    qwen.load_state_dict(llama.state_dict())
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

    assert torch.equal(qwen(TOKENS).logits, llama(TOKENS).logits)
    assert torch.equal(qwen.generate(TOKENS, **options), llama.generate(TOKENS, **options))


def test_the_names_of_llama_fit_qwen2() -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()  # type: ignore[arg-type]

    assert 2 == apply_qk_norm(model)
    layer = model.model.layers[0].self_attn
    query = layer.q_proj(torch.randn(2, 3, 16))
    torch.testing.assert_close(torch.ones(2, 3, 4), query.unflatten(-1, (4, 4)).square().mean(-1), rtol=1e-2, atol=1e-2)


def test_queries_and_keys_of_gpt2_are_normalized_and_values_are_not() -> None:
    model = make_gpt2()
    x, layer = torch.randn(2, 3, 16), model.transformer.h[1].attn
    query, key, value = layer.c_attn(x).split(16, dim=-1)
    assert 2 == apply_qk_norm(model)
    layer.q_norm.weight.data, layer.k_norm.weight.data = torch.randn(4), torch.randn(4)
    actual = layer.c_attn(x).split(16, dim=-1)

    torch.testing.assert_close(slow_norm(query, layer.q_norm.weight, "rms"), actual[0])
    torch.testing.assert_close(slow_norm(key, layer.k_norm.weight, "rms"), actual[1])
    assert torch.equal(value, actual[2])


def test_scores_are_bounded_by_the_root_of_the_head_dimension() -> None:
    model = make_gpt2(attn_implementation="eager")
    apply_qk_norm(model)
    layer = model.transformer.h[0].attn
    with torch.no_grad():
        layer.c_attn.weight.mul_(1000)
    query, key, _ = layer.c_attn(torch.randn(2, 9, 16)).unflatten(-1, (3, 4, 4)).unbind(-3)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * layer.scaling

    assert 1 < scores.abs().max() <= 2 + 1e-5


def test_cross_attention_of_gpt2_is_not_changed() -> None:
    model = make_gpt2(add_cross_attention=True)

    assert 2 == apply_qk_norm(model)
    assert not any("q_norm" in name for name, _ in model.transformer.h[0].crossattention.named_modules())


def test_layers_with_other_names_are_normalized() -> None:
    model = SimpleTransformerModel()
    x, layer = torch.randn(2, 3, 16), model.layer
    query, key, value = layer.qkv(x).chunk(3, -1)

    assert 1 == apply_qk_norm(model, "layer", query_name="qkv", key_name="qkv", head_dim=8)
    expected = [slow_norm(query, torch.ones(8), "layer"), slow_norm(key, torch.ones(8), "layer"), value]
    torch.testing.assert_close(torch.cat(expected, -1), layer.qkv(x))


def test_a_second_call_changes_nothing() -> None:
    model = make_llama()
    apply_qk_norm(model)
    expected, names = model(TOKENS).logits, list(model.state_dict())

    assert 2 == apply_qk_norm(model)
    assert names == list(model.state_dict())
    assert torch.equal(expected, model(TOKENS).logits)


def test_copies_and_pickles_have_their_own_norms() -> None:
    model = make_llama()
    apply_qk_norm(model)
    expected = model(TOKENS).logits
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        model.model.layers[0].self_attn.q_norm.weight.zero_()

    assert all(torch.equal(expected, copied(TOKENS).logits) for copied in copies)
    assert not torch.equal(expected, model(TOKENS).logits)
    with torch.no_grad():
        copies[0].model.layers[0].self_attn.q_norm.weight.zero_()
    assert torch.equal(model(TOKENS).logits, copies[0](TOKENS).logits)


def test_gains_have_the_dtype_and_mode_of_their_layer() -> None:
    model = make_llama().to(torch.bfloat16)
    apply_qk_norm(model)
    norm = model.model.layers[0].self_attn.q_norm

    assert torch.bfloat16 is norm.weight.dtype
    assert not norm.training


def test_gains_join_the_group_without_weight_decay() -> None:
    model = make_llama()
    weights = [p for p in model.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}])
    apply_qk_norm(model, optimizers=optimizer)
    gains = [p for name, p in model.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight"))]

    assert 4 == len(gains)
    assert {id(p) for p in (*scales, *gains)} == {id(p) for p in optimizer.param_groups[1]["params"]}
    assert len(weights) == len(optimizer.param_groups[0]["params"])


def test_gains_join_the_only_group() -> None:
    model = make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_qk_norm(model, optimizers=optimizer)

    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}


def test_models_without_such_layers_are_warned_of() -> None:
    with pytest.warns(NoEffectWarning, match=r"no layer .* named `q_proj` and `k_proj` or `c_attn` and `c_attn`"):
        assert 0 == apply_qk_norm(nn.Linear(2, 2))
    qwen = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4))  # type: ignore[arg-type]
    with pytest.warns(NoEffectWarning, match=r"changed nothing: .* and no `q_norm`"):
        assert 0 == apply_qk_norm(qwen)


def test_the_head_dimension_must_be_known_and_fit() -> None:
    model = SimpleTransformerModel()
    with pytest.raises(ValueError, match=r"`head_dim` must be given for layers without .* `_TransformerLayer`"):
        apply_qk_norm(model, query_name="qkv", key_name="qkv")
    with pytest.raises(ValueError, match=r"`head_dim` must divide the outputs of `qkv` / 3, got 12 for 48 outputs"):
        apply_qk_norm(model, query_name="qkv", key_name="qkv", head_dim=12)
    with pytest.raises(ValueError, match=r"`head_dim` must divide the outputs of `q_proj`, got 5 for 16 outputs"):
        apply_qk_norm(make_llama(), head_dim=5)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`norm` must be 'rms' or 'layer', got 'batch'"):
        apply_qk_norm(nn.Linear(2, 2), "batch")
    with pytest.raises(ValueError, match=r"`eps` must not be negative, got -1"):
        apply_qk_norm(nn.Linear(2, 2), eps=-1)
    with pytest.raises(ValueError, match=r"must be given together, got 'query' and None"):
        apply_qk_norm(nn.Linear(2, 2), query_name="query")
    with pytest.raises(ValueError, match=r"`head_dim` must be at least 1, got 0"):
        apply_qk_norm(nn.Linear(2, 2), head_dim=0)


class ViTAttention(nn.Module):
    """Attention of timm, which calls an identity in place of norms."""

    def __init__(self, qk_norm: bool = False) -> None:
        super().__init__()
        self.head_dim, self.qkv = 4, nn.Linear(16, 48)
        self.q_norm, self.k_norm = (HeadNorm(4) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2)


def test_an_identity_in_place_of_a_norm_is_replaced() -> None:
    attention, expected = ViTAttention(), ViTAttention(qk_norm=True)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)

    assert apply_qk_norm(attention, query_name="qkv", key_name="qkv", optimizers=optimizer) == 1
    with torch.no_grad():
        attention.q_norm.weight.uniform_(0.5, 2.0)
    expected.load_state_dict(attention.state_dict())
    x = torch.randn(2, 5, 16)

    torch.testing.assert_close(expected(x), attention(x), rtol=0, atol=0)
    assert any(parameter is attention.k_norm.weight for parameter in optimizer.param_groups[0]["params"])
    assert apply_qk_norm(attention, query_name="qkv", key_name="qkv") == 1, "and not once more"


def make_by_head(kind: str) -> tuple[Any, Any]:
    """Return a GPT-NeoX or a Bloom, and its first attention layer."""
    torch.manual_seed(0)
    if kind == "neox":
        config = GPTNeoXConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=16, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model: Any = GPTNeoXForCausalLM(config).eval()
        return model, model.gpt_neox.layers[0].attention
    model = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=4)).eval()
    return model, model.transformer.h[0].self_attention


@pytest.mark.parametrize("kind", ["neox", "bloom"])
def test_projections_with_query_key_and_value_of_each_head_side_by_side(kind: str) -> None:
    model, layer = make_by_head(kind)
    x = torch.randn(2, 5, 16)
    query, key, value = layer.query_key_value(x).view(2, 5, 4, 3, 4).unbind(-2)  # as both models divide it
    assert apply_qk_norm(model) == 2
    actual = layer.query_key_value(x).view(2, 5, 4, 3, 4).unbind(-2)

    for part, expected in zip(actual[:2], (query, key), strict=True):
        torch.testing.assert_close(part, expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-6))
    assert torch.equal(actual[2], value)
    tokens = torch.randint(32, (2, 6))
    logits = model(tokens).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(model(tokens[:, :5], use_cache=True).logits, logits[:, :5])


def test_queries_that_share_keys_are_not_changed() -> None:
    config = FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, multi_query=True)
    with pytest.warns(NoEffectWarning, match="no layer"):
        assert apply_qk_norm(FalconForCausalLM(config)) == 0
