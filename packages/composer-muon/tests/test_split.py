"""The division of models' parameters between Muon and another optimizer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms.muon import MuonSplit, split_muon_parameters


def mlp(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_the_lazy_name_is_the_function() -> None:
    assert cf.split_muon_parameters is split_muon_parameters


def test_every_trainable_parameter_is_in_one_part() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    model[1].requires_grad_(False)
    split = split_muon_parameters(model)

    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert split.matrices.keys() | split.others.keys() == trainable
    assert {"2.weight"} == split.matrices.keys()
    assert {"0.weight": "first layer", "4.weight": "last layer"}.items() <= split.reasons.items()


def test_embeddings_and_a_tied_head_are_not_for_muon() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(50, 8), nn.Parameter(torch.zeros(16, 8))
            self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
            self.after = nn.Linear(8, 8)
            self.head.weight = self.tokens.weight

    split = split_muon_parameters(Language())

    assert {"hidden.weight"} == split.matrices.keys()
    assert "tied" == split.reasons["tokens.weight"]
    assert "not the weight of a layer" == split.reasons["positions"]


def test_the_output_embeddings_of_transformers_are_not_for_muon() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head, self.hidden = nn.Embedding(50, 8), nn.Linear(8, 50), mlp(8, 8, 8)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    split = split_muon_parameters(Language())

    assert {"hidden.0.weight"} == split.matrices.keys()
    assert "output embeddings" == split.reasons["head.weight"]


class Conv1D(nn.Module):
    """As in transformers: a linear layer with a weight of shape (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))


@pytest.mark.parametrize(
    ("name", "layer", "blocks", "transposed"),
    [
        ("qkv", nn.Linear(8, 24), (8, 8, 8), False),
        ("c_attn", Conv1D(24, 8), (8, 8, 8), True),
        ("c_proj", Conv1D(8, 8), None, True),
        ("gate_up_proj", nn.Linear(8, 32), (16, 16), False),
        ("Wi", nn.Linear(8, 32), (16, 16), False),
        ("kv", nn.Linear(8, 16), (8, 8), False),
        ("up", nn.Linear(8, 24), None, False),
    ],
)
def test_fused_layers_are_divided(name: str, layer: nn.Module, blocks: Any, transposed: bool) -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 8), name: layer, "last": nn.Linear(8, 4)})
    matrix = split_muon_parameters(model).matrices[f"{name}.weight"]

    assert (blocks, transposed) == (matrix.blocks, matrix.transposed)


@pytest.mark.parametrize("name", ["qkv", "c_attn", "query_key_value"])
def test_fused_layers_with_unequal_or_interleaved_parts_are_left(name: str) -> None:
    """With grouped queries, and with heads side by side as in GPT-NeoX."""
    width = 24 if name == "query_key_value" else 16
    model = nn.ModuleDict({"first": nn.Linear(4, 8), name: nn.Linear(8, width), "last": nn.Linear(8, 4)})
    split = split_muon_parameters(model)

    assert split.reasons[f"{name}.weight"] == "several matrices of unknown parts"
    assert split_muon_parameters(model, include=[name + ".weight"]).matrices.keys() == {f"{name}.weight"}


def test_the_projections_of_an_attention_of_torch_are_divided() -> None:
    model = nn.ModuleList([nn.Linear(4, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 4)])
    matrices = split_muon_parameters(model).matrices

    assert {"1.in_proj_weight", "1.out_proj.weight"} == matrices.keys()
    assert (8, 8, 8) == matrices["1.in_proj_weight"].blocks


def test_convolutions_of_groups_are_several_matrices_and_depthwise_ones_are_left() -> None:
    hidden = [nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 8, 2)]
    split = split_muon_parameters(nn.Sequential(nn.Conv2d(3, 8, 3), *hidden, nn.Linear(8, 4)))

    assert {"1.weight": 2} == {name: matrix.groups for name, matrix in split.matrices.items()}
    assert "depthwise" == split.reasons["2.weight"]
    assert "not the weight of a layer" == split.reasons["3.weight"]


def test_extreme_shapes_are_left() -> None:
    split = split_muon_parameters(mlp(4, 8, 3, 8, 2000, 8, 4))

    assert "a side below 4" == split.reasons["1.weight"] == split.reasons["2.weight"]
    assert "long and narrow" == split.reasons["3.weight"]


def test_low_rank_adapters_are_left() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(8, 8).requires_grad_(False)
            self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(8, 8, bias=False)}) for _ in range(2))

    model = nn.ModuleList([nn.Linear(4, 8), Adapted(), nn.Linear(8, 8), nn.Linear(8, 4)])
    split = split_muon_parameters(model)

    assert {"2.weight"} == split.matrices.keys()
    assert "low-rank adapter" == split.reasons["1.lora_A.default.weight"] == split.reasons["1.lora_B.default.weight"]


def test_a_weight_that_is_computed_from_another_one_is_that_one() -> None:
    class Centred(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight - weight.mean(1, keepdim=True)

    model = mlp(4, 8, 8, 8, 4)
    nn.utils.parametrize.register_parametrization(model[1], "weight", Centred())
    nn.utils.parametrizations.weight_norm(model[2])  # of two parameters, none of which is the matrix

    assert {"1.parametrizations.weight.original"} == split_muon_parameters(model).matrices.keys()


def test_patterns_include_and_exclude() -> None:
    model = mlp(4, 8, 8, 4)
    split = split_muon_parameters(model, include=[r"^0\.weight", "2.weight"], exclude=["1."])

    assert {"0.weight", "2.weight"} == split.matrices.keys()
    assert "excluded" == split.reasons["1.weight"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"include": "weight"}, TypeError, "`include` must be a sequence of regular expressions"),
        ({"include": 5}, TypeError, "`include` must be a sequence of regular expressions, got 5"),
        ({"exclude": [5]}, TypeError, r"`exclude` must be a sequence of regular expressions, got \[5\]"),
        ({"include": ["("]}, ValueError, "`include` must hold regular expressions"),
        (
            {"exclude": ["nothing"]},
            ValueError,
            "`exclude` must match trainable parameters, but none contains 'nothing'",
        ),
        ({"include": ["bias"]}, ValueError, r"`include` must match matrices, but '0.bias' has the shape \(8,\)"),
    ],
)
def test_wrong_patterns_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_muon_parameters(mlp(4, 8, 4), **arguments)


def test_experts_in_one_weight_are_not_included() -> None:
    model = mlp(4, 8, 8, 4)
    model.experts = nn.Parameter(torch.zeros(3, 8, 8))

    with pytest.raises(ValueError, match=r"'experts' has the shape \(3, 8, 8\). Leave it"):
        split_muon_parameters(model, include=["experts"])


def test_a_model_without_layers_has_no_matrices() -> None:
    assert MuonSplit() == split_muon_parameters(nn.ReLU())
