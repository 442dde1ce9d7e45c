"""Biased attention against the plain definition, with masks, caches and in every form that `transformers` knows."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    RobertaConfig,
    RobertaForMaskedLM,
    StaticCache,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from composer import functional as cf
from composer.algorithms.alibi import apply_alibi
from composer.algorithms.alibi.attention_surgery_functions import (
    policy_registry,
    register_alibi,
    utils,
    zero_and_freeze_expand_position_embeddings,
)
from composer.algorithms.alibi.attention_surgery_functions.attention import LinearBias
from composer.algorithms.alibi.attention_surgery_functions.utils import get_alibi_head_slopes
from composer.devices import DeviceGPU

HEADS, LENGTH = 3, 40
KINDS = ["eager", "sdpa"]
MODELS = ["bert", "roberta", "gpt2"]
COMMON: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(attention: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"n_positions": 8, "n_embd": 24, "n_layer": 2, "n_head": HEADS, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**{**COMMON, **sizes, **options}, attn_implementation=attention)).eval()


def encoder(kind: str, attention: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "max_position_embeddings": 8,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": 32,
        "initializer_range": 0.3,
    }
    options = {**COMMON, **sizes, **options, "attn_implementation": attention}
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**options)).eval()
    return RobertaForMaskedLM(RobertaConfig(**options)).eval()


def build(kind: str, attention: str = "sdpa") -> Any:
    return gpt2(attention) if kind == "gpt2" else encoder(kind, attention)


def attention_layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.endswith(("SelfAttention", "GPT2Attention"))]


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(1))


def slow_attention(q: Any, k: Any, v: Any, slopes: list[float], seen: torch.Tensor) -> torch.Tensor:
    """`softmax(q k^T / sqrt(d) + bias) v` over the keys that are seen, for tensors of shape (B, H, n, d)."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h, slope in enumerate(slopes):
            for i in range(q.shape[2]):
                js = [j for j in range(k.shape[2]) if seen[b, i, j]]
                if not js:
                    continue
                scores = torch.stack([q[b, h, i] @ k[b, h, j] / math.sqrt(q.shape[3]) - slope * abs(i - j) for j in js])
                out[b, h, i] = sum(w * v[b, h, j] for w, j in zip(scores.softmax(0), js, strict=True))
    return out.transpose(1, 2).flatten(2)


def project(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    parts = (
        layer.c_attn(x).chunk(3, dim=2) if hasattr(layer, "c_attn") else [layer.query(x), layer.key(x), layer.value(x)]
    )
    return [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts]


def record(layer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    calls: list[Any] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((args[0] if args else kwargs["hidden_states"], output[0]))

    layer.register_forward_hook(hook, with_kwargs=True)
    return calls


class TestSlopes:
    def test_they_equal_those_of_the_paper(self) -> None:
        """Section 3: 8 heads, from 1/2 to 1/256; 16 heads, the geometric means between them too."""
        assert [2.0**-k for k in range(1, 9)] == get_alibi_head_slopes(8)
        assert pytest.approx([2 ** (-k / 2) for k in range(1, 17)]) == get_alibi_head_slopes(16)
        assert [2.0**-8] == get_alibi_head_slopes(1)

    def test_other_numbers_take_every_second_one_of_the_next_power(self) -> None:
        assert [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8] == get_alibi_head_slopes(6)
        for n in range(1, 40):
            power = 2 ** int(math.log2(n))
            expected = get_alibi_head_slopes(power) + get_alibi_head_slopes(2 * power)[::2]
            assert pytest.approx(expected[:n]) == get_alibi_head_slopes(n)

    def test_the_earlier_name_is_the_same_function(self) -> None:
        assert utils._get_alibi_head_slopes is get_alibi_head_slopes

    def test_the_device_computes_the_same(self) -> None:
        for n in (1, 2, 6, 8, 12, 16, 25):
            slopes = LinearBias(n, 8)._slopes(torch.device("cpu"))

            torch.testing.assert_close(torch.tensor(get_alibi_head_slopes(n)), slopes.flatten())
            assert (1, n, 1, 1) == slopes.shape

    def test_there_must_be_a_head(self) -> None:
        with pytest.raises(ValueError, match=r"`n_heads` must be at least 1, got 0"):
            get_alibi_head_slopes(0)


class TestRegisterAlibi:
    def test_the_buffer_is_the_bias(self) -> None:
        slopes = get_alibi_head_slopes(6)
        full: Any = register_alibi(nn.Linear(2, 2), n_heads=6, max_token_length=5, causal=False)
        short: Any = register_alibi(nn.Linear(2, 2), n_heads=6, max_token_length=5, causal=True)
        expected = torch.tensor([[[-m * abs(i - j) for j in range(5)] for i in range(5)] for m in slopes])

        assert torch.equal(expected[None], full.alibi)
        assert torch.equal(torch.tensor([[[m * j for j in range(5)]] for m in slopes]), short.alibi)
        assert {"weight", "bias"} == set(full.state_dict())

    def test_both_forms_are_the_same_under_a_causal_mask(self) -> None:
        full: Any = register_alibi(nn.Module(), n_heads=4, max_token_length=7, causal=False)
        short: Any = register_alibi(nn.Module(), n_heads=4, max_token_length=7, causal=True)
        later = torch.ones(7, 7).triu(1).bool()
        scores = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(0)).masked_fill(later, -math.inf)

        torch.testing.assert_close((scores + full.alibi[0]).softmax(-1), (scores + short.alibi).softmax(-1))

    def test_a_second_call_replaces_it(self) -> None:
        module = register_alibi(nn.Module(), n_heads=2, max_token_length=4, causal=True)

        assert (2, 1, 9) == register_alibi(module, 2, 9, causal=True).alibi.shape  # type: ignore[union-attr]

    def test_another_attribute_with_that_name_stays(self) -> None:
        module: Any = nn.Module()
        module.alibi = "other"
        for length in (4, 9):
            register_alibi(module, n_heads=2, max_token_length=length, causal=True)

        assert "other" == module.alibi
        assert (2, 1, 9) == module.composer_alibi.shape
        assert {} == module.state_dict()


def test_attributes_of_a_layer_with_likely_names_stay_and_change_nothing() -> None:
    outputs = []
    for extra in (False, True):
        torch.manual_seed(0)
        model = gpt2().eval()
        for layer in attention_layers(model) if extra else []:
            layer.alibi, layer.model_config = "other", None
        apply_alibi(model, LENGTH)
        outputs.append(model(tokens(1, 8)).logits)

    assert torch.equal(*outputs)
    assert [("other", None)] * len(attention_layers(model)) == [
        (m.alibi, m.model_config) for m in attention_layers(model)
    ]


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_layers_compute_the_definition(kind: str, padded: bool, attention: str) -> None:
    model, n = build(kind, attention), 12
    apply_alibi(model, LENGTH)
    layers = attention_layers(model)
    calls = [record(layer) for layer in layers]
    ids, mask = tokens(2, n), torch.ones(2, n, dtype=torch.int64)
    if padded:
        hidden = slice(0, 3) if kind == "gpt2" else slice(n - 3, n)
        ids[0, hidden], mask[0, hidden] = 0, 0
    model(ids, attention_mask=mask if padded else None)
    seen = mask[:, None, :].bool().expand(2, n, n)
    if kind == "gpt2":
        seen = seen.tril()

    assert [2, 1, 1] == [len(layers), *map(len, calls)]
    for layer, [(x, actual)] in zip(layers, calls, strict=True):
        expected = slow_attention(*project(layer, x), get_alibi_head_slopes(HEADS), seen)
        if kind == "gpt2":
            expected = layer.c_proj(expected)
        torch.testing.assert_close(expected[mask.bool()], actual[mask.bool()], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", KINDS)
def test_a_decoder_of_bert_is_biased_too(attention: str) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        **COMMON,
        max_position_embeddings=8,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=32,
        is_decoder=True,
        attn_implementation=attention,
    )
    model = BertLMHeadModel(config).eval()
    apply_alibi(model, LENGTH)
    (layer,) = attention_layers(model)
    calls = record(layer)
    model(tokens(2, 9), use_cache=False)
    (x, actual) = calls[0]
    seen = torch.ones(2, 9, 9).tril()

    expected = slow_attention(*project(layer, x), get_alibi_head_slopes(HEADS), seen)
    torch.testing.assert_close(expected, actual, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("options", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_options_of_gpt2_are_kept(options: dict[str, Any], attention: str) -> None:
    model = gpt2(attention, **options, reorder_and_upcast_attn=True)
    apply_alibi(model, LENGTH)
    layer = attention_layers(model)[1]
    calls = record(layer)
    model(tokens(1, 6))
    x, actual = calls[0]
    q, k, v = project(layer, x)
    q = q * math.sqrt(8) if "scale_attn_weights" in options else q / 2

    expected = layer.c_proj(slow_attention(q, k, v, get_alibi_head_slopes(HEADS), torch.ones(1, 6, 6).tril()))
    torch.testing.assert_close(expected, actual, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", KINDS)
class TestCaches:
    def prepared(self, attention: str) -> Any:
        model = gpt2(attention)
        apply_alibi(model, LENGTH)
        return model

    @pytest.mark.parametrize("steps", [[1] * 10, [5, 1, 4], [10]])
    @pytest.mark.parametrize("static", [False, True])
    def test_tokens_one_by_one_are_the_whole_sequence(self, steps: list[int], static: bool, attention: str) -> None:
        model, ids = self.prepared(attention), tokens(2, 10)
        expected = model(ids).logits
        cache: Any = DynamicCache(config=model.config)
        if static:
            cache = StaticCache(config=model.config, max_cache_len=24)
        parts, start = [], 0
        for count in steps:
            places = torch.arange(start, start + count)
            # The second argument is `past_key_values`, which transformers 5.24 calls `cache`.
            part = model(ids[:, places], cache, use_cache=True, position_ids=places[None], cache_position=places)
            parts.append(part.logits)
            start += count

        torch.testing.assert_close(expected, torch.cat(parts, dim=1), atol=1e-5, rtol=1e-4)

    def test_padding_on_the_left_changes_nothing(self, attention: str) -> None:
        model, ids = self.prepared(attention), tokens(1, 7)
        padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], dim=1)
        logits = model(padded, attention_mask=(padded > 0).long()).logits

        assert torch.isfinite(logits).all()
        torch.testing.assert_close(model(ids).logits, logits[:, 4:], atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
    def test_generation_with_a_cache_is_generation_without(self, cache: dict[str, str], attention: str) -> None:
        model, ids = self.prepared(attention), tokens(3, 8)
        ids[0, :3] = 0
        options: dict[str, Any] = {"attention_mask": (ids > 0).long(), "max_new_tokens": 12, "do_sample": False}
        options["eos_token_id"] = None  # generate up to the maximum length
        expected = model.generate(ids, **options, use_cache=False)

        assert torch.equal(expected, model.generate(ids, **options, **cache))
        assert (3, 20) == expected.shape


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_nearest_keys_are_exact_in_16_bits(self, dtype: torch.dtype) -> None:
        """`m * j` would not be: 500 and 500.5 are one number in bfloat16."""
        bias, n = LinearBias(8, 2048), 1200
        slopes = torch.tensor(get_alibi_head_slopes(8))
        expected = (-slopes[:, None] * torch.arange(15, -1, -1)).to(dtype)
        sizes = {"square": (n, None), "one": (1, None), "static": (1, torch.arange(2048) < n)}
        for name, (q, mask) in sizes.items():
            shown = 2048 if mask is not None else n
            total = bias.for_scores(torch.empty(1, 8, q, 4, dtype=dtype), shown, mask, causal=True)

            assert torch.equal(expected, total[0, :, -1, n - 16 : n]), name

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_bias_is_rounded_once(self, dtype: torch.dtype) -> None:
        """Slopes such as 2^-0.5 are no numbers of 16 bits."""
        bias, n = LinearBias(12, 300), 300
        exact = (
            torch.tensor(get_alibi_head_slopes(12))[:, None, None] * -(torch.arange(n)[:, None] - torch.arange(n)).abs()
        )
        square = bias.for_scores(torch.empty(1, 12, n, 4, dtype=dtype), n, None, causal=False)
        line = bias.for_scores(torch.empty(1, 12, 1, 4, dtype=dtype), n, None, causal=True)

        assert torch.equal(exact.to(dtype), square[0])
        assert torch.equal(exact[:, -1:].to(dtype), line[0])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_sums_with_a_mask_are_finite(self, dtype: torch.dtype) -> None:
        """Minus infinity would make rows that see nothing NaN."""
        bias, query = LinearBias(2, 64), torch.empty(1, 2, 5, 4, dtype=dtype)
        for n in (5, 64):
            boolean = torch.ones(1, 1, 5, n, dtype=torch.bool)
            boolean[..., 0, :] = False
            for added in (dtype, torch.float32):
                mask = torch.zeros(1, 1, 5, n, dtype=added).masked_fill(~boolean, torch.finfo(added).min)
                for each in (boolean, mask):
                    total = bias.for_scores(query, n, each, causal=True)
                    assert dtype is total.dtype
                    assert torch.isfinite(total).all()
                    assert torch.isfinite(total.double().softmax(-1)).all()

    @pytest.mark.parametrize("attention", KINDS)
    @pytest.mark.parametrize("kind", MODELS)
    def test_half_precision_and_autocast_work(self, kind: str, attention: str) -> None:
        model = build(kind, attention)
        apply_alibi(model, LENGTH)
        ids, mask = tokens(2, 10), torch.ones(2, 10, dtype=torch.int64)
        mask[0, 7:] = 0
        expected = model(ids, attention_mask=mask).logits[:, :7]
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(ids, attention_mask=mask).logits[:, :7].float()
        half = model.to(torch.bfloat16)(ids, attention_mask=mask).logits[:, :7].float()

        # Logits are about 1.5 wide, and bfloat16 keeps 8 bits of each of many sums.
        for actual in (mixed, half):
            assert (expected - actual).abs().mean() < 0.05 * expected.std()


class TestWork:
    """Work that is done once, and not in every step or layer."""

    def test_a_step_without_padding_makes_no_bias(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = gpt2("sdpa"), tokens(2, 10)
        apply_alibi(model, LENGTH)
        model(ids)
        monkeypatch.setattr(LinearBias, "_slopes", None)  # fails if called
        model(ids)
        model(ids[:, :9])

    def test_a_mask_is_added_once_for_all_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        plain: Callable[..., torch.Tensor] = LinearBias._masked
        monkeypatch.setattr(LinearBias, "_masked", lambda *args: (calls.append(1), plain(*args))[1])
        for kind in MODELS:
            for attention in KINDS:
                model, ids = build(kind, attention), tokens(2, 10)
                apply_alibi(model, LENGTH)
                mask = torch.ones_like(ids)
                mask[0, 8:] = 0
                calls.clear()
                model(ids, attention_mask=mask)
                assert [1] == calls
                model(ids, attention_mask=mask)
                assert [1, 1] == calls

    def test_a_mask_that_was_written_into_is_added_again(self) -> None:
        bias, query = LinearBias(2, 8), torch.empty(1, 2, 4, 4)
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        first = bias.for_scores(query, 4, mask, causal=False)
        assert first is bias.for_scores(query, 4, mask, causal=False)
        mask[..., 0] = False

        assert not torch.equal(first, bias.for_scores(query, 4, mask, causal=False))

    @pytest.mark.parametrize("attention", KINDS)
    def test_tables_computed_in_inference_mode_are_used_in_training(self, attention: str) -> None:
        model, ids = gpt2(attention), tokens(2, 10)
        apply_alibi(model, LENGTH)
        with torch.inference_mode():
            expected = model(ids, attention_mask=torch.ones_like(ids)).logits
        actual = model(ids).logits
        actual.sum().backward()

        torch.testing.assert_close(expected, actual)

    def test_fake_tensors_are_not_cached(self) -> None:
        bias = LinearBias(2, 8)
        with FakeTensorMode():
            bias.for_scores(torch.empty(1, 2, 4, 4), 4, None, causal=True)

        assert not bias._tables

    def test_layers_share_one_bias_that_copies_do_not(self) -> None:
        model = gpt2()
        apply_alibi(model, LENGTH)
        model(tokens(1, 8))
        first, second = (layer._composer_alibi for layer in attention_layers(model))
        copied, other = (layer._composer_alibi for layer in attention_layers(copy.deepcopy(model)))

        assert first is second
        assert copied is other
        assert copied is not first
        assert first._tables
        assert not copied._tables

    @pytest.mark.parametrize("kind", MODELS)
    def test_it_compiles_to_one_graph(self, kind: str) -> None:
        model, ids = build(kind), tokens(2, 10)
        apply_alibi(model, LENGTH)
        mask = torch.ones_like(ids)
        mask[0, 8:] = 0
        layer = attention_layers(model)[0]
        x, seen = torch.randn(2, 10, 24), mask[:, None, None, :].bool().expand(2, 1, 10, 10)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        for each in (seen, None):
            torch.testing.assert_close(layer(x, attention_mask=each)[0], compiled(x, attention_mask=each)[0])
        torch.compiler.reset()

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("attention", KINDS)
    def test_a_gpu_gives_the_same_without_waiting(self, attention: str) -> None:
        model, ids = gpt2(attention), tokens(2, 10)
        apply_alibi(model, LENGTH)
        layer, x = attention_layers(model)[0], torch.randn(2, 10, 24)
        hidden = torch.ones(1, 1, 10, 10).triu(1) * torch.finfo(torch.float32).min
        logits, outputs = model(ids).logits, layer(x, attention_mask=hidden)[0]
        DeviceGPU(allow_tf32=False)  # as exact as the CPU
        model, x, hidden = model.cuda(), x.cuda(), hidden.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = layer(x, attention_mask=hidden)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")

        torch.testing.assert_close(outputs, actual.cpu(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(logits, model(ids.cuda()).logits.cpu(), atol=1e-3, rtol=1e-3)


class TestSurgery:
    def test_the_function_is_registered(self) -> None:
        assert apply_alibi is cf.apply_alibi

    @pytest.mark.parametrize("kind", MODELS)
    def test_positions_are_zero_and_frozen_for_the_new_length(self, kind: str) -> None:
        model = build(kind)
        table = model.transformer.wpe if kind == "gpt2" else model.base_model.embeddings.position_embeddings
        before = table.weight
        apply_alibi(model, LENGTH)
        rows = LENGTH + 1 if kind == "roberta" else LENGTH  # it counts from `padding_idx + 1`

        assert before is table.weight
        assert torch.equal(torch.zeros(rows, 24), table.weight)
        assert not table.weight.requires_grad
        assert rows == table.num_embeddings

    @pytest.mark.parametrize("attention", KINDS)
    @pytest.mark.parametrize("kind", MODELS)
    def test_longer_sequences_work_also_after_a_second_time(self, kind: str, attention: str) -> None:
        """Batches bring no token types: they, too, must be there for each position."""
        model = build(kind, attention).train()
        for length in (LENGTH, 2 * LENGTH):
            apply_alibi(model, length)
            model(tokens(2, length)).logits.sum().backward()

        assert all(p.grad is not None for p in model.base_model.parameters() if p.requires_grad and p.dim() > 1)

    @pytest.mark.parametrize("kind", MODELS)
    def test_nothing_else_changes(self, kind: str) -> None:
        model, plain = build(kind), build(kind)
        apply_alibi(model, LENGTH)
        table = "wpe" if kind == "gpt2" else "position_embeddings"
        expected, actual = plain.state_dict(), model.state_dict()

        assert list(expected) == list(actual)  # no buffer is saved
        assert all(torch.equal(actual[name], value) for name, value in expected.items() if table not in name)
        assert not model.training
        head = model.get_output_embeddings()
        assert head.weight is model.get_input_embeddings().weight  # still tied

    def test_a_bare_model_is_changed_too(self) -> None:
        model = gpt2().transformer
        apply_alibi(model, LENGTH)

        assert isinstance(model, GPT2Model)
        assert not model.wpe.weight.any()
        assert (1, LENGTH, 24) == model(tokens(1, LENGTH)).last_hidden_state.shape

    def test_the_optimizer_keeps_training_the_same_parameters(self) -> None:
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        model(tokens(2, 8)).logits.sum().backward()
        optimizer.step()
        before = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        apply_alibi(model, LENGTH, optimizers=optimizer)
        model(tokens(2, 8)).logits.sum().backward()
        optimizer.step()

        assert before == [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        assert not model.transformer.wpe.weight.any()

    @pytest.mark.parametrize("attention", KINDS)
    def test_another_model_of_the_same_configuration_stays(self, attention: str) -> None:
        config = gpt2(attention).config
        model, other = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
        expected = other(tokens(1, 8)).logits
        apply_alibi(model, LENGTH)

        assert torch.equal(expected, other(tokens(1, 8)).logits)
        assert attention == config._attn_implementation

    def test_cross_attention_stays(self) -> None:
        model = gpt2(add_cross_attention=True)
        apply_alibi(model, LENGTH)
        states = torch.randn(1, 5, 24)
        block = model.transformer.h[0]

        assert block.crossattention.config is model.config
        assert not hasattr(block.crossattention, "alibi")
        assert block.attn.config is not model.config
        assert (1, 7, 50) == model(tokens(1, 7), encoder_hidden_states=states).logits.shape

    def test_a_pickled_model_works_where_alibi_was_not_applied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = gpt2()
        apply_alibi(model, LENGTH)
        expected, data = model(tokens(1, 9)).logits, pickle.dumps(model)
        monkeypatch.delitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "composer_alibi")

        torch.testing.assert_close(expected, pickle.loads(data)(tokens(1, 9)).logits)

    def test_attention_weights_are_returned_by_eager_attention_also_if_it_is_chosen_later(self) -> None:
        model = gpt2("sdpa")
        apply_alibi(model, LENGTH)
        expected = model(tokens(1, 9)).logits
        model.set_attn_implementation("eager")
        outputs = model(tokens(1, 9), output_attentions=True)

        torch.testing.assert_close(expected, outputs.logits, atol=1e-5, rtol=1e-4)
        assert [(1, HEADS, 9, 9)] * 2 == [weights.shape for weights in outputs.attentions]
        torch.testing.assert_close(torch.ones(1, HEADS, 9), outputs.attentions[0].sum(-1))

    def test_dropout_of_the_weights_is_kept(self) -> None:
        for attention in KINDS:
            model = gpt2(attention, attn_pdrop=0.5, embd_pdrop=0.0, resid_pdrop=0.0).train()
            apply_alibi(model, LENGTH)

            assert not torch.equal(model(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


class TestErrors:
    def test_attention_that_takes_no_bias_is_refused_before_anything_changes(self) -> None:
        model = gpt2()
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(NotImplementedError, match=r"accepts a bias, 'eager' or 'sdpa', got 'flash_attention_2'"):
            apply_alibi(model, LENGTH)

        assert model.transformer.wpe.weight.all()
        assert 8 == model.transformer.wpe.num_embeddings

    def test_attention_that_takes_no_bias_is_refused_when_it_is_chosen_later(self) -> None:
        model = gpt2()
        apply_alibi(model, LENGTH)
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(NotImplementedError, match=r"got 'flex_attention'\. Build the model with"):
            attention_layers(model)[0](torch.zeros(1, 4, 24))

    def test_relative_positions_are_refused(self) -> None:
        model = encoder("bert")
        attention_layers(model)[0].position_embedding_type = "relative_key"
        with pytest.raises(
            NotImplementedError, match=r"absolute position embeddings, but those of .* are 'relative_key'"
        ):
            apply_alibi(model, LENGTH)

    def test_layers_that_compute_attention_themselves_are_refused(self) -> None:
        """A bias would silently not be used."""
        model = gpt2()
        layer = attention_layers(model)[0]

        class Own(type(layer)):  # type: ignore[misc]
            def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
                return hidden_states, None

        class Wrapped(type(layer)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward(*args, **kwargs)

        layer.__class__ = Own
        with pytest.raises(
            NotImplementedError, match=r"ALiBi needs layers that look up .*, but `Own.forward` does not"
        ):
            apply_alibi(model, LENGTH)
        layer.__class__ = Wrapped
        apply_alibi(model, LENGTH)
        assert hasattr(layer, "_composer_alibi")

    def test_sequences_must_not_be_longer_than_applied_for(self) -> None:
        with pytest.raises(ValueError, match=r"`max_sequence_length` must be at least.*got 8 for 9 tokens"):
            LinearBias(2, 8).for_scores(torch.empty(1, 2, 9, 4), 9, None, causal=True)

    def test_lengths_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match=r"`max_sequence_length` must be at least 1, got 0"):
            apply_alibi(gpt2(), 0)

    def test_the_model_itself_cannot_be_replaced(self) -> None:
        class Root(nn.Module):
            pass

        def other(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module:
            return nn.Identity()

        policy_registry.register(Root)(other)
        try:
            with pytest.raises(ValueError, match=r"The policy for `Root` replaces `model` itself"):
                apply_alibi(Root(), LENGTH)
        finally:
            del policy_registry[Root]

    def test_a_missing_table_is_logged_and_raised(self, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(AttributeError):
            zero_and_freeze_expand_position_embeddings(nn.Linear(2, 2), 8, "a.b")

        assert ["Linear has no `a.b` to set to zero and freeze."] == [record.getMessage() for record in caplog.records]
