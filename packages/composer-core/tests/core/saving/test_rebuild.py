"""Algorithms are rebuilt from their representation by parsing: plain values pass, anything else is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.core.saving.rebuild import rebuild
from composer.loggers import Logger


class Kept(Algorithm):
    events = frozenset({Event.INIT})

    def __init__(self, value: Any = None, other: Any = None) -> None:
        self.value, self.other = value, other

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


def value_of(text: str) -> Any:
    return rebuild(Kept, f"Kept({text})").value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("value=-1.5", -1.5),
        ("+3", 3),
        ("1e-12", 1e-12),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("'a(b)'", "a(b)"),
        ("[1, (True, None), {'a': {2}}]", [1, (True, None), {"a": {2}}]),
        ("{}", {}),
        ("Event.INIT", Event.INIT),
        ("Time(0.5, TimeUnit.DURATION)", Time(0.5, TimeUnit.DURATION)),
        ("Time(value=3, unit='ba')", Time(3, TimeUnit.BATCH)),
    ],
)
def test_plain_values_are_read(text: str, expected: Any) -> None:
    found = value_of(text)

    assert expected == found
    assert type(expected) is type(found)


def test_nan_is_read() -> None:
    assert math.isnan(value_of("nan"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_what_python_prints_of_plain_values_is_read_back(value: Any) -> None:
    expected = Kept(value)
    text = repr(expected)
    if len(text) < 5_000:
        assert repr(rebuild(Kept, text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Kept(__import__('os').system('true'))", "is not a plain value"),
        ("Kept(open('x'))", "is not a plain value"),
        ("Kept(Event.INIT.__class__)", "is not a plain value"),
        ("Kept(Event.__members__)", "is not a plain value"),
        ("Kept(os.environ)", "is not a plain value"),
        ("Kept(act_fn)", "`act_fn` is not a plain value"),
        ("Kept(-'a')", "is not a plain value"),
        ("Kept(1 + 1)", "is not a plain value"),
        ("Kept(*[1])", "is not a plain value"),
        ("Kept(**{'value': 1})", "is not a plain value"),
        ("Kept({**{}})", "is not a plain value"),
        ("Kept(b'a')", "is not a plain value"),
        ("Kept(...)", "is not a plain value"),
        ("Kept(2j)", "is not a plain value"),
        ("Kept(f'{1}')", "is not a plain value"),
        ("Kept((lambda: 1)())", "is not a plain value"),
        ("Kept([x for x in (1,)])", "is not a plain value"),
        ("Time(1, TimeUnit.BATCH)", "is not a call of `Kept`"),
        ("composer.Kept()", "is not a call of `Kept`"),
        ("Kept", "is not a call of `Kept`"),
        ("Kept()()", "is not a call of `Kept`"),
        ("<Kept object at 0x7f>", "is not a constructor call"),
        ("Kept(); Kept()", "is not a constructor call"),
        ("Kept(" * 2_000, "is not a constructor call"),
        ("Kept(" + "[" * 1_500 + "]" * 1_500 + ")", "is not a constructor call"),
        ("Kept(\0)", "null bytes|is not a constructor call"),
        ("Kept('" + "a" * 10_000 + "')", "at most 10000 characters"),
        (None, "must be a string"),
    ],
)
def test_anything_else_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rebuild(Kept, text)


def test_what_the_constructor_refuses_is_passed_on() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'renamed'"):
        rebuild(Kept, "Kept(renamed=1)")
    with pytest.raises(TypeError, match="unhashable"):
        rebuild(Kept, "Kept({[]})")
