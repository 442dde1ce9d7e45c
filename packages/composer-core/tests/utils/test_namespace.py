"""The exports of `composer.utils`, the names of other packages in it, and the cost of its import."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import composer.utils
from composer.core import _registry
from composer.utils import file_helpers, iter_helpers

# The public names of the established API that core has; `tests/test_public_names.py` has those of other packages.
HERE = """
    ensure_tuple get_free_tcp_port MissingConditionalImportError import_object is_model_fsdp is_model_fsdp2
    is_notebook StringEnum ensure_folder_has_no_conflicting_files format_name_with_dist format_name_with_dist_and_time
    parse_uri batch_get batch_set model_eval_mode get_device create_interval_scheduler partial_format
    add_vision_dataset_transform VersionedDeprecationWarning STR_TO_DTYPE
""".split()
MODULES = "dist reproducibility misc module_surgery file_helpers string_enum batch_helpers iter_helpers".split()


def test_every_name_of_this_floor_is_exported() -> None:
    assert set(HERE) <= set(composer.utils.__all__)
    assert all(hasattr(composer.utils, name) for name in [*composer.utils.__all__, *MODULES])


def test_a_star_import_shadows_no_module() -> None:
    assert not {"warnings", "dist", "device"} & set(composer.utils.__all__)


@pytest.mark.parametrize("module", [composer.utils, file_helpers, iter_helpers])
def test_a_name_that_no_package_provides_is_an_attribute_error(module: Any) -> None:
    with pytest.raises(AttributeError, match=r"`composer.utils` has no `S3Store`: no installed package provides it"):
        module.S3Store


@pytest.mark.parametrize("module", [composer.utils, file_helpers, iter_helpers])
def test_probing_for_private_names_reads_no_entry_points(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "load", lambda *args: pytest.fail("looked up"))

    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute '__wrapped__'"):
        module.__wrapped__


@pytest.mark.parametrize("module", [composer.utils, file_helpers, iter_helpers])
def test_a_name_of_a_higher_package_comes_from_there(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = object()
    points = {"GiftedStore": SimpleNamespace(load=lambda: store)}
    monkeypatch.setattr(_registry, "points", lambda group: points if group == "composer.utils" else {})

    try:
        assert module.GiftedStore is store
    finally:
        vars(module).pop("GiftedStore", None)


def test_importing_is_cheap_and_has_no_effects() -> None:
    """Also: asking for FSDP must not import it."""
    program = """
import os, random, sys, warnings
import numpy, torch
before = set(sys.modules), dict(os.environ), random.getstate(), torch.get_rng_state().tolist(), sys.excepthook
import composer.utils, composer.devices
after = set(sys.modules), dict(os.environ), random.getstate(), torch.get_rng_state().tolist(), sys.excepthook
assert before[1:] == after[1:]
assert not torch.distributed.is_initialized()
assert not composer.utils.is_model_fsdp(torch.nn.ReLU()) and not composer.utils.is_model_fsdp2(torch.nn.ReLU())
heavy = ("torchvision", "torchmetrics", "transformers", "torch.distributed.fsdp", "torch._inductor", "psutil")
print(*sorted(set(heavy) & (set(sys.modules) - before[0])))
"""

    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert (result.stdout, result.stderr) == ("\n", "")
