"""The layer against the plain definition, and surgery on models of `transformers`."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, RobertaConfig, RobertaModel
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput

from composer import functional as cf
from composer.algorithms.gated_linear_units import (
    BERTGatedFFOutput,
    apply_gated_linear_units,
    from_BertIntermediate,
    from_BertOutput,
)
from composer.algorithms.gated_linear_units import gated_linear_unit_layers as layers_module
from composer.algorithms.warnings import NoEffectWarning
from composer.devices import DeviceGPU
from composer.utils import MissingConditionalImportError

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 36,
}


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**{**SIZES, **options}))


def gated_layers(model: nn.Module) -> list[BERTGatedFFOutput]:
    return [module for module in model.modules() if isinstance(module, BERTGatedFFOutput)]


def slow_layer(layer: BERTGatedFFOutput, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Number by number, for GELU, without dropout."""

    def linear(part: nn.Linear, row: list[float]) -> list[float]:
        bias = [0.0] * part.out_features if part.bias is None else part.bias.tolist()
        return [
            sum(w * v for w, v in zip(ws, row, strict=True)) + b
            for ws, b in zip(part.weight.tolist(), bias, strict=True)
        ]

    rows = []
    for row, before in zip(x.tolist(), residual.tolist(), strict=True):
        gate = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in linear(layer.gated_layer, row)]
        gated = [g * v for g, v in zip(gate, linear(layer.non_gated_layer, row), strict=True)]
        total = [v + b for v, b in zip(linear(layer.wo, gated), before, strict=True)]
        mean = sum(total) / len(total)
        scale = math.sqrt(sum((v - mean) ** 2 for v in total) / len(total) + layer.layernorm.eps)
        norm = zip(total, layer.layernorm.weight.tolist(), layer.layernorm.bias.tolist(), strict=True)
        rows.append([(v - mean) / scale * w + b for v, w, b in norm])
    return torch.tensor(rows, dtype=x.dtype)


class TestLayer:
    @given(
        d_embed=st.integers(2, 5),
        d_ff=st.integers(1, 6),
        gate=st.booleans(),
        other=st.booleans(),
        seed=st.integers(0, 99),
    )
    def test_it_is_the_plain_definition(self, d_embed: int, d_ff: int, gate: bool, other: bool, seed: int) -> None:
        torch.manual_seed(seed)
        layer = BERTGatedFFOutput(d_embed, d_ff, 0.0, nn.GELU(), 1e-3, gate, other).double()
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        x, residual = torch.randn(2, 3, d_embed, dtype=torch.float64)

        torch.testing.assert_close(slow_layer(layer, x, residual), layer(x, residual))
        assert [gate, other, True] == [
            part.bias is not None for part in (layer.gated_layer, layer.non_gated_layer, layer.wo)
        ]

    def test_dropout_applies_to_the_gated_values(self) -> None:
        layer = BERTGatedFFOutput(8, 16, 1.0, nn.GELU(), 1e-5)
        x, residual = torch.randn(2, 4, 8)

        torch.testing.assert_close(layer.layernorm(layer.wo.bias + residual), layer(x, residual))
        assert not torch.equal(layer(x, residual), layer.eval()(x, residual))

    def test_there_are_no_biases_by_default(self) -> None:
        layer = BERTGatedFFOutput(8, 16, 0.0, torch.relu, 1e-5)

        assert layer.gated_layer.bias is None
        assert layer.non_gated_layer.bias is None
        assert layers_module.BERTGatedFFOutput is BERTGatedFFOutput


class TestSurgery:
    def test_the_function_is_registered(self) -> None:
        assert apply_gated_linear_units is cf.apply_gated_linear_units

    @pytest.mark.parametrize("kind", [BertForMaskedLM, BertForSequenceClassification])
    def test_every_block_is_gated(self, kind: Any) -> None:
        model = kind(BertConfig(**SIZES))
        apply_gated_linear_units(model, optimizers=None)

        assert 2 == len(gated_layers(model))
        assert not any(isinstance(module, (BertOutput, BertIntermediate)) for module in model.modules())
        assert all(type(layer.intermediate) is nn.Identity for layer in model.bert.encoder.layer)

    def test_layers_keep_their_width_so_the_parameters_become_more(self) -> None:
        """They are not narrowed by 2/3."""
        model = bert(hidden_dropout_prob=0.3, layer_norm_eps=1e-6)
        before = sum(parameter.numel() for parameter in model.parameters())
        apply_gated_linear_units(model, optimizers=None)
        layer = gated_layers(model)[0]

        assert (36, 24) == layer.gated_layer.weight.shape == layer.non_gated_layer.weight.shape
        assert (24, 36) == layer.wo.weight.shape
        assert 0.3 == layer.dropout.p
        assert 1e-6 == layer.layernorm.eps
        # One more matrix in each block, and one bias of the inner width less.
        assert before + 2 * (24 * 36 - 36) == sum(parameter.numel() for parameter in model.parameters())

    def test_a_block_computes_its_layers(self) -> None:
        model = bert(num_hidden_layers=1).eval()
        apply_gated_linear_units(model, optimizers=None)
        block = model.bert.encoder.layer[0]
        x = torch.randn(1, 5, 24)
        attended = block.attention(x)[0]
        expected = slow_layer(block.output, attended[0], attended[0])

        torch.testing.assert_close(expected, block(x)[0], atol=1e-5, rtol=1e-5)

    def test_the_activation_is_that_of_the_model_unless_given(self) -> None:
        for name, kind in (("relu", nn.ReLU), ("tanh", nn.Tanh)):
            model = bert(hidden_act=name)
            apply_gated_linear_units(model, optimizers=None)
            assert all(isinstance(layer.act, kind) for layer in gated_layers(model))
        for act_fn in (torch.tanh, nn.PReLU()):
            model = bert()
            apply_gated_linear_units(model, None, act_fn, True, False)
            first, second = gated_layers(model)
            assert isinstance(act_fn, nn.Module) == (first.act is not second.act)  # no shared weights
            assert isinstance(act_fn, nn.Module) or act_fn is first.act
            assert first.gated_layer.bias is not None
            assert first.non_gated_layer.bias is None

    def test_a_function_can_be_the_activation_of_the_model(self) -> None:
        model = bert()
        for layer in model.bert.encoder.layer:
            del layer.intermediate.intermediate_act_fn  # a module makes no way for a function
            layer.intermediate.intermediate_act_fn = torch.nn.functional.gelu
        apply_gated_linear_units(model, optimizers=None)

        assert all(layer.act is torch.nn.functional.gelu for layer in gated_layers(model))

    def test_the_optimizer_trains_the_new_parameters_instead_of_the_old_ones(self) -> None:
        model = bert()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
        apply_gated_linear_units(model, optimizers=optimizer)
        trained = optimizer.param_groups[0]["params"]

        assert {id(parameter) for parameter in model.parameters()} == {id(parameter) for parameter in trained}
        assert len(trained) == len(list(model.parameters()))
        model(torch.arange(8)[None]).logits.sum().backward()
        before = gated_layers(model)[0].gated_layer.weight.clone()
        optimizer.step()
        assert not torch.equal(before, gated_layers(model)[0].gated_layer.weight)

    def test_dtype_and_mode_are_kept(self) -> None:
        model = bert().eval().to(torch.bfloat16)
        apply_gated_linear_units(model, optimizers=None)

        assert {torch.bfloat16} == {parameter.dtype for parameter in model.parameters()}
        assert not any(module.training for module in model.modules())

    def test_the_device_is_kept(self) -> None:
        model = bert().to("meta")
        apply_gated_linear_units(model, optimizers=None)

        assert {"meta"} == {parameter.device.type for parameter in model.parameters()}

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_a_gpu_gives_the_same(self) -> None:
        model, ids = bert().eval(), torch.arange(8)[None]
        apply_gated_linear_units(model, optimizers=None)
        expected = model(ids).logits
        DeviceGPU(allow_tf32=False)  # as exact as the CPU

        torch.testing.assert_close(expected, model.cuda()(ids.cuda()).logits.cpu(), atol=1e-4, rtol=1e-3)
        on_device = bert().cuda()
        apply_gated_linear_units(on_device, optimizers=None)
        assert {"cuda"} == {parameter.device.type for parameter in on_device.parameters()}

    def test_applying_it_twice_is_applying_it_once(self) -> None:
        model = bert()
        apply_gated_linear_units(model, optimizers=None)
        before = dict(model.named_modules())
        apply_gated_linear_units(model, optimizers=None)

        assert before == dict(model.named_modules())

    def test_factories_do_not_depend_on_the_number_of_the_layer(self) -> None:
        config = BertConfig(**SIZES)
        layer = from_BertOutput(BertOutput(config), 7, torch.relu, non_gated_layer_bias=True)

        assert layer.non_gated_layer.bias is not None
        assert isinstance(from_BertIntermediate(BertIntermediate(config), 7), nn.Identity)


class TestErrors:
    @pytest.mark.parametrize("model", [nn.Linear(2, 2), RobertaModel(RobertaConfig(**SIZES))])
    def test_only_models_of_bert_are_known(self, model: nn.Module) -> None:
        with pytest.raises(
            TypeError, match=r"`model` must be or contain a `BertPreTrainedModel`.*got (Linear|Roberta)"
        ):
            apply_gated_linear_units(model, optimizers=None)

    def test_a_bert_without_such_layers_gets_a_warning(self) -> None:
        model = bert(num_hidden_layers=0)
        with pytest.warns(
            NoEffectWarning, match=r"`apply_gated_linear_units` changed nothing.*no replaceable feed-forward layer"
        ):
            apply_gated_linear_units(model, optimizers=None)

    def test_several_activations_need_one_to_be_given(self) -> None:
        model = bert()
        model.bert.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()
        with pytest.raises(ValueError, match=r"`act_fn` must be given.*got \['GELUActivation', 'ReLU'\]"):
            apply_gated_linear_units(model, optimizers=None)
        apply_gated_linear_units(model, optimizers=None, act_fn=nn.ReLU())

        assert 2 == len(gated_layers(model))

    def test_no_activation_needs_one_to_be_given(self) -> None:
        model = bert(num_hidden_layers=1)
        model.bert.encoder.layer[0].intermediate.intermediate_act_fn = None
        with pytest.raises(ValueError, match=r"`act_fn` must be given.*got \['None'\]"):
            apply_gated_linear_units(model, optimizers=None)

        assert not gated_layers(model)

    def test_transformers_must_be_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "transformers.models.bert.modeling_bert"
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingConditionalImportError, match=r"'nlp' are not installed.*pip install transformers"):
            apply_gated_linear_units(nn.Identity(), optimizers=None)

    def test_another_missing_module_is_named_in_the_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> None:
            raise ModuleNotFoundError("No module named 'regex'", name="regex")

        monkeypatch.setattr("composer.algorithms.gated_linear_units.gated_linear_units.import_module", fail)
        with pytest.raises(ModuleNotFoundError, match="No module named 'regex'"):
            apply_gated_linear_units(nn.Identity(), optimizers=None)


def test_frozen_layers_and_layers_with_adapters_stay_with_one_warning() -> None:
    model = bert(num_hidden_layers=3)
    first, second, third = model.bert.encoder.layer
    first.intermediate.requires_grad_(False)
    second.output.dense = nn.ModuleDict({"base_layer": second.output.dense, "lora_A": nn.Linear(36, 2)})
    before = [first.intermediate, first.output, second.intermediate, second.output]
    with pytest.warns(UserWarning, match=r"(?s)left 4 modules.*it is frozen.*it has adapters") as caught:
        apply_gated_linear_units(model, optimizers=None)

    assert 1 == len(caught)
    assert before == [first.intermediate, first.output, second.intermediate, second.output]
    assert [third.output] == gated_layers(model)
