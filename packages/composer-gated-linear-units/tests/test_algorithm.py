"""`GatedLinearUnits` with the engine."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from composer.algorithms.gated_linear_units import BERTGatedFFOutput, GatedLinearUnits
from composer.core import ADDS_NORMS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.utils import MissingConditionalImportError


def model() -> Any:
    config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=36)
    return nn.ModuleDict({"model": BertForMaskedLM(config)})  # wrapped, as by a `ComposerModel`


def gated_layers(module: nn.Module) -> list[BERTGatedFFOutput]:
    return [part for part in module.modules() if isinstance(part, BERTGatedFFOutput)]


def test_layers_are_gated_at_init_with_the_arguments_of_the_algorithm() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    algorithm = GatedLinearUnits(act_fn=torch.tanh, gated_layer_bias=True)
    Engine(State(model=module, max_duration="1ep", optimizers=optimizer, algorithms=algorithm)).run_event("init")
    layers = gated_layers(module)

    assert 2 == len(layers)
    assert all(layer.act is torch.tanh for layer in layers)
    assert [(True, False)] * 2 == [(x.gated_layer.bias is not None, x.non_gated_layer.bias is not None) for x in layers]
    trained = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert {id(parameter) for parameter in module.parameters()} == trained


def test_a_custom_activation_is_a_placeholder_in_the_representation() -> None:
    """It contains no memory address, which would differ between runs."""
    expected = "GatedLinearUnits(act_fn=act_fn,gated_layer_bias=False,non_gated_layer_bias=True)"

    assert expected == repr(GatedLinearUnits(lambda x: x, non_gated_layer_bias=True))


def test_it_is_required_on_load() -> None:
    assert GatedLinearUnits.required_on_load()


def test_transformers_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.bert.modeling_bert", None)
    with pytest.raises(MissingConditionalImportError, match="'nlp' are not installed"):
        GatedLinearUnits()


class OnNorms(Algorithm):
    """A method that replaces the final norms of the model."""

    events = frozenset({Event.INIT})
    placement = Placement(after={ADDS_NORMS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = len(gated_layers(state.model))


@pytest.mark.parametrize("reverse", [False, True])
def test_methods_that_replace_norms_get_the_new_ones_in_any_order_of_the_list(reverse: bool) -> None:
    after = OnNorms()
    algorithms = [after, GatedLinearUnits()]
    state = State(model=model(), max_duration="1ep")
    Engine(state, algorithms=algorithms[::-1] if reverse else algorithms).run_event("init")

    assert 2 == after.seen
