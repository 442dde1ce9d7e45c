"""Registration of policies. Annotations are postponed in this module, as in the code of users."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from composer.algorithms.alibi import apply_alibi
from composer.algorithms.alibi.attention_surgery_functions import PolicyRegistry, policy_registry
from composer.algorithms.warnings import NoEffectWarning


class Attention(nn.Module):
    """An unknown attention layer."""


class Other(nn.Module):
    """Another unknown layer."""


def accepted(module: torch.nn.Module, module_index: int, max_sequence_length: int) -> nn.Module | None:
    return None


@pytest.fixture
def known_attention() -> Iterator[list[tuple[int, int]]]:
    """A policy for `Attention`, with a list of its calls."""
    calls: list[tuple[int, int]] = []

    @policy_registry.register(Attention)
    def change(module: nn.Module, index: int, max_sequence_length: int) -> nn.Module:
        calls.append((index, max_sequence_length))
        return module

    yield calls
    del policy_registry[Attention]


class TestRegister:
    def test_a_function_can_be_registered_for_several_classes(self) -> None:
        registry = PolicyRegistry()

        assert accepted is registry.register(Attention, Other)(accepted)
        assert {Attention: accepted, Other: accepted} == registry

    def test_annotations_may_be_objects(self) -> None:
        def policy(module, index, max_sequence_length):  # type: ignore[no-untyped-def]
            return None

        policy.__annotations__.update(module=nn.Module, index=int, max_sequence_length=int)

        assert policy is PolicyRegistry().register(Attention)(policy)

    def test_postponed_names_may_be_unknown_at_run_time(self) -> None:
        """Imported under `TYPE_CHECKING`, or within a function."""

        def policy(module: torch.nn.Module, index: int, max_sequence_length: int) -> Any:
            return None

        for name in ("Module", "nn.Module", "absent.nn.Module"):
            policy.__annotations__["module"] = name
            assert policy is PolicyRegistry().register(Attention)(policy)
        policy.__annotations__["module"] = "absent.Tensor"
        with pytest.raises(TypeError, match=r"`module` of `policy` must be annotated `Module`, got 'absent.Tensor'"):
            PolicyRegistry().register(Attention)(policy)

    def test_at_least_one_class_must_be_given(self) -> None:
        with pytest.raises(ValueError, match=r"`modules` must not be empty"):
            PolicyRegistry().register()

    def test_classes_must_be_modules(self) -> None:
        for wrong in (dict, nn.Linear(1, 1)):
            with pytest.raises(TypeError, match=r"`modules` must be subclasses of `torch.nn.Module`"):
                PolicyRegistry().register(wrong)(accepted)  # type: ignore[arg-type]

    def test_classes_must_have_no_policy_and_none_gets_one_if_one_has(self) -> None:
        registry = PolicyRegistry()
        registry.register(Attention)(accepted)
        with pytest.raises(ValueError, match=r"Attention has `accepted`.*del policy_registry\[Attention\]"):
            registry.register(Other, Attention)(accepted)

        assert Other not in registry

    def test_functions_must_take_three_arguments(self) -> None:
        def policy(module: nn.Module, max_sequence_length: int) -> None:
            return None

        with pytest.raises(ValueError, match=r"`policy` must take three arguments .*, got 2"):
            PolicyRegistry().register(Attention)(policy)  # type: ignore[type-var]

    @pytest.mark.parametrize("name", ["module", "index", "max_sequence_length"])
    def test_arguments_must_be_annotated(self, name: str) -> None:
        def policy(module: nn.Module, index: int, max_sequence_length: int) -> None:
            return None

        policy.__annotations__[name] = "str"
        with pytest.raises(TypeError, match=rf"`{name}` of `policy` must be annotated `(Module|int)`, got 'str'"):
            PolicyRegistry().register(Attention)(policy)

    def test_the_length_must_have_its_name(self) -> None:
        def policy(module: nn.Module, index: int, length: int) -> None:
            return None

        with pytest.raises(NameError, match=r"`policy` must be named `max_sequence_length`, got `length`"):
            PolicyRegistry().register(Attention)(policy)


class TestApply:
    def test_an_unknown_model_gets_a_warning_and_a_log_record(self, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.warns(NoEffectWarning, match="`apply_alibi` changed nothing: .*`GPT2Attention`") as caught:
            apply_alibi(nn.Sequential(Attention()), 8)

        (record,) = caplog.records

        assert caught[0].filename == __file__
        assert logging.WARNING == record.levelno
        assert "alibi" in record.name

    def test_a_model_with_a_registered_policy_gets_none(
        self, caplog: pytest.LogCaptureFixture, known_attention: list[tuple[int, int]]
    ) -> None:
        apply_alibi(nn.Sequential(Attention(), Attention()), 8)

        assert not caplog.records
        assert [(0, 8), (1, 8)] == known_attention

    def test_the_policy_of_the_model_itself_is_used(self, known_attention: list[tuple[int, int]]) -> None:
        apply_alibi(Attention(), 8)

        assert [(0, 8)] == known_attention
