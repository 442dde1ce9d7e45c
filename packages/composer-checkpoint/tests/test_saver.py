"""Values that a checkpoint can and cannot hold, and arguments of the saver, without a Trainer."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import re
import uuid
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from composer.callbacks import CheckpointSaver
from composer.checkpoint import UnsafeCheckpointError, safe_torch_load
from composer.checkpoint.file import write_file
from composer.checkpoint.safe_load import unloadable
from composer.core import Engine, State


class Color(enum.Enum):
    RED = 1


def holds_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["me"] = value
    return value


LOADABLE = {
    "empty array": lambda: np.zeros((0, 3)),
    "text": lambda: np.array(["ab"]),
    "dates": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "generator": lambda: np.random.RandomState(0).get_state(),
    "frozen set": lambda: frozenset({1}),
    "bytearray": lambda: bytearray(b"ab"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "view": lambda: torch.arange(12).view(3, 4).t(),
    "shared": lambda: [[1, 2]] * 50,
    "itself": holds_itself,
    "large from one": lambda: torch.ones(1).expand(10**9),
    "deque": lambda: deque([1, [2]], maxlen=3),
    "date": lambda: datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    "path": lambda: Path("a/b"),
    "decimal": lambda: decimal.Decimal("1.50"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "uuid": lambda: uuid.UUID(int=5),
}
UNLOADABLE = {
    "fields": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "objects": lambda: np.array([1, "a"], dtype=object),
}
ALLOWED_ONLY = {
    "enum": (Color.RED, [Color]),
    "key": ({Color.RED: 1}, [Color]),
    "namespace": (SimpleNamespace(a=1), [SimpleNamespace]),
    "range": (range(3), [range]),
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize("name", LOADABLE)
def test_what_loads_is_saved_without_a_word(tmp_path: Path, name: str) -> None:
    value = LOADABLE[name]()
    content = {"callbacks": {"Mine": value}}

    assert list(unloadable(content)) == []
    write_file(content, tmp_path / "a.pt")
    loaded = safe_torch_load(tmp_path / "a.pt")["callbacks"]["Mine"]
    assert type(loaded) is type(value)
    if not isinstance(value, torch.Tensor):
        assert repr(value) == repr(loaded)


@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_cannot_be_loaded_is_told_whatever_is_allowed(tmp_path: Path, name: str) -> None:
    content = {"callbacks": {"Other": [1], "Mine": UNLOADABLE[name]()}}
    torch.save(content, tmp_path / "a.pt")
    ((where, what),) = unloadable(content)
    with pytest.raises(UnsafeCheckpointError) as caught:
        safe_torch_load(tmp_path / "a.pt")

    assert where == "callbacks/Mine"
    assert re.search("cannot be loaded again: .* holds an array of the NumPy type .* with parts or of objects", what)
    assert "allow these types" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_told_before_they_are_saved(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)

    ((where, _),) = unloadable({"callbacks": {"Mine": nested}})
    assert where == "callbacks/Mine"


@pytest.mark.parametrize("name", ALLOWED_ONLY)
def test_what_loads_once_it_is_allowed_names_all_types(tmp_path: Path, name: str) -> None:
    value, types = ALLOWED_ONLY[name]
    if Color in types and Color.RED.__reduce_ex__(2)[0] is getattr:
        pytest.skip("this Python, 3.11.0 to 3.11.3, pickles an enum with `getattr`, which torch never loads")
    content = {"callbacks": {"Mine": value}}
    ((where, what),) = unloadable(content)
    torch.save(content, tmp_path / "a.pt")

    assert where == "callbacks/Mine"
    assert all(f"`{kind.__module__}.{kind.__qualname__}`" in what.partition("with")[2] for kind in types)
    with torch.serialization.safe_globals(types):
        assert list(unloadable(content)) == []
        assert safe_torch_load(tmp_path / "a.pt") == content


def test_one_value_out_of_many_is_found_quickly() -> None:
    shared = list(range(1_000))
    content = {"many": {f"layer{i}": shared for i in range(1_000)}, "odd": [shared, Color.RED]}

    assert [where for where, _ in unloadable(content)] == ["odd/1"]


def test_a_loop_of_ones_own_finds_its_files_after_the_end_of_fit(tmp_path: Path) -> None:
    saver = CheckpointSaver(str(tmp_path), filename="ba{batch}.pt", asynchronous=True)
    engine = Engine(State(torch.nn.Linear(1, 1), max_duration="1ba", dataloader=[0], callbacks=saver))
    engine.run_event("init")
    engine.run_event("fit_start")
    engine.state.timestamp = engine.state.timestamp.to_next_batch()
    engine.run_event("fit_end")

    assert saver.saved_checkpoints == [str(tmp_path / "ba1.pt")]
    engine.close()


def test_the_savers_own_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="num_concurrent_uploads"):
        CheckpointSaver(num_concurrent_uploads=0)
    with pytest.raises(ValueError, match="upload_timeout_in_seconds"):
        CheckpointSaver(upload_timeout_in_seconds=0)
