"""`Alibi` with the engine: when it acts, and how it cuts batches."""

from __future__ import annotations

import sys
from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

from composer.algorithms.alibi import Alibi, apply_alibi
from composer.core import Engine, Event, State
from composer.loggers import Logger
from composer.utils import MissingConditionalImportError


def model() -> nn.Module:
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    module: nn.Module = GPT2LMHeadModel(config)
    return module


def started(algorithm: Alibi) -> tuple[State, Engine]:
    state = State(model=model(), max_duration="1ep", algorithms=algorithm, dataloader=[], dataloader_label="train")
    engine = Engine(state, Logger(state))
    engine.run_event("init")
    return state, engine


def cut(batch: Any, scaling: float = 0.25) -> Any:
    algorithm = Alibi(8, train_sequence_length_scaling=scaling)
    state = State(model=nn.Identity(), max_duration="1ep")
    state.batch = batch
    algorithm.apply(Event.AFTER_DATALOADER, state, Logger(state))
    return state.batch


class TestEvents:
    def test_the_model_is_changed_once_and_every_batch_is_cut(self) -> None:
        algorithm = Alibi(max_sequence_length=32, train_sequence_length_scaling=0.25)
        state, engine = started(algorithm)
        table = state.model.transformer.wpe  # type: ignore[union-attr]
        for _ in range(2):
            state.batch = {"input_ids": torch.arange(32).view(2, 16)}
            engine.run_event("after_dataloader")
            assert torch.equal(torch.arange(32).view(8, 4), state.batch["input_ids"])

        assert (32, 8) == table.weight.shape  # type: ignore[union-attr]
        assert not algorithm.match(Event.INIT, state)
        assert algorithm.match(Event.AFTER_DATALOADER, state)

    def test_it_is_required_on_load(self) -> None:
        assert Alibi.required_on_load()

    def test_applying_it_in_two_runs_is_applying_it_once(self) -> None:
        state, _ = started(Alibi(max_sequence_length=32))
        names = [name for name, _ in state.model.named_modules()]
        again = State(model=state.model, max_duration="1ep", algorithms=Alibi(max_sequence_length=32))
        before = {name: value.clone() for name, value in state.model.state_dict().items()}
        Engine(again, Logger(again)).run_event("init")

        assert names == [name for name, _ in again.model.named_modules()]
        assert list(before) == list(again.model.state_dict())
        assert all(torch.equal(before[name], value) for name, value in again.model.state_dict().items())

    def test_transformers_must_be_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package = "composer.algorithms.alibi.attention_surgery_functions"
        for name in [name for name in sys.modules if name.startswith(package)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "transformers", None)
        monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)
        with pytest.raises(MissingConditionalImportError, match=r"'nlp' are not installed.*pip install transformers"):
            apply_alibi(nn.Identity(), 8)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match="attention_surgery_functions"):
            apply_alibi(nn.Identity(), 8)


class TestArguments:
    @pytest.mark.parametrize("scaling", [0, -0.5, 1.5])
    def test_scaling_must_be_a_fraction(self, scaling: float) -> None:
        with pytest.raises(ValueError, match=r"`train_sequence_length_scaling` must be above 0 and at most 1, got"):
            Alibi(8, train_sequence_length_scaling=scaling)

    def test_lengths_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match=r"`max_sequence_length` must be at least 1, got 0"):
            Alibi(0)


class TestBatches:
    @given(count=st.integers(1, 5), short=st.integers(1, 6), pieces=st.integers(1, 12), width=st.integers(0, 3))
    def test_no_token_is_lost_or_moved(self, count: int, short: int, pieces: int, width: int) -> None:
        shape = (count, short * pieces) + ((width,) if width else ())
        value = torch.arange(count * short * pieces * max(width, 1)).view(shape)
        actual = cut({"input_ids": value}, 1 / pieces)["input_ids"]
        rows = [row[k * short : (k + 1) * short] for row in value for k in range(pieces)]

        assert torch.equal(torch.stack(rows), actual)

    def test_rows_may_span_sequences_if_tokens_come_out_even(self) -> None:
        actual = cut({"input_ids": torch.arange(24).view(3, 8)}, 0.75)

        assert torch.equal(torch.arange(24).view(4, 6), actual["input_ids"])

    @pytest.mark.parametrize("kind", [dict, UserDict, BatchEncoding])
    def test_any_mapping_is_cut_and_keeps_its_type(self, kind: Any) -> None:
        given = kind({"input_ids": torch.arange(16).view(2, 8), "attention_mask": torch.ones(2, 8)})
        actual = cut(given, 0.5)

        assert kind is type(actual)
        assert [(4, 4), (4, 4)] == [actual[key].shape for key in ("input_ids", "attention_mask")]
        assert [(2, 8), (2, 8)] == [given[key].shape for key in ("input_ids", "attention_mask")]

    def test_a_mapping_that_cannot_be_written_becomes_a_dict(self) -> None:
        actual = cut(MappingProxyType({"input_ids": torch.arange(16).view(2, 8)}), 0.5)

        assert (4, 4) == actual["input_ids"].shape

    def test_values_per_example_are_repeated_for_each_piece(self) -> None:
        """The pieces of example 0 come first."""
        batch = {
            "labels": torch.tensor([3, 5]),
            "scores": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
            "input_ids": torch.arange(16).view(2, 8),
        }
        actual = cut(batch)

        assert [3, 3, 3, 3, 5, 5, 5, 5] == actual["labels"].tolist()
        assert [[1.0, 2.0, 3.0]] * 4 == actual["scores"][:4].tolist()
        assert [0, 1] == actual["input_ids"][0].tolist()
        assert [8, 9] == actual["input_ids"][4].tolist()

    def test_other_values_stay(self) -> None:
        batch = {
            "input_ids": torch.arange(16).view(2, 8),
            "step": torch.tensor(3),
            "table": torch.zeros(5, 8),
            "name": "text",
            "none": None,
        }
        actual = cut(batch)

        assert all(actual[key] is batch[key] for key in ("step", "table", "name", "none"))

    def test_without_token_ids_the_first_matrix_determines_the_length(self) -> None:
        actual = cut({"labels": torch.zeros(2), "inputs_embeds": torch.zeros(2, 8, 3), "other": torch.zeros(2, 3)}, 0.5)

        assert [(4,), (4, 4, 3), (4, 3)] == [value.shape for value in actual.values()]

    @pytest.mark.parametrize("batch", [{"labels": torch.zeros(4)}, (torch.zeros(2, 8), torch.zeros(2)), {"a": "b"}])
    def test_batches_without_sequences_stay(self, batch: Any) -> None:
        assert batch is cut(batch)

    def test_by_default_sequences_of_any_length_are_not_cut(self) -> None:
        state, engine = started(Alibi(max_sequence_length=32))
        state.batch = batch = {"input_ids": torch.zeros(2, 10)}
        engine.run_event("after_dataloader")

        assert batch is state.batch

    @pytest.mark.parametrize(("shape", "scaling"), [((2, 10), 0.25), ((2, 8), 0.01), ((1, 8), 0.75)])
    def test_pieces_must_be_whole(self, shape: tuple[int, int], scaling: float) -> None:
        with pytest.raises(ValueError, match=r"must cut sequences into whole pieces, got .* for . of \d+ tokens"):
            cut({"input_ids": torch.zeros(shape)}, scaling)

    def test_repeated_values_need_a_whole_number_of_pieces(self) -> None:
        with pytest.raises(
            ValueError, match=r"must be one over a whole number .*'labels', is repeated.*6 out of 8 tokens"
        ):
            cut({"input_ids": torch.zeros(3, 8), "labels": torch.zeros(3)}, 0.75)
