"""Compare nested values, such as checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch


def deep_compare(
    a: Any, b: Any, atol: float = 0.0, rtol: float = 0.0, ignore_keys: Collection[str] | None = None
) -> None:
    """Assert that two nested values are equal.

    Tensors, arrays and floats are compared with the tolerances; nan equals nan. Tensors may be on different devices,
    but must have the same dtype.

    Args:
        a: Any nesting of mappings, lists, tuples, sets, tensors, arrays and values with `==`.
        b: The other value.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        ignore_keys: Keys of mappings, at any depth, that are not compared.

    Raises:
        AssertionError: The values differ. The message starts with the path to the first difference.

    Example:
        >>> deep_compare({"x": torch.ones(2), "time": 1}, {"x": torch.ones(2), "time": 2}, ignore_keys=["time"])
    """
    _compare(a, b, "", atol, rtol, frozenset(ignore_keys or ()))


def _compare(a: Any, b: Any, path: str, atol: float, rtol: float, ignore: frozenset[str]) -> None:
    where = path or "/"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        _equal({*a} - ignore, {*b} - ignore, f"{where}: keys")
        for key in a:
            if key not in ignore:
                _compare(a[key], b[key], f"{path}/{key}", atol, rtol, ignore)
        return
    if type(a) is not type(b):
        raise AssertionError(f"{where}: {type(a).__name__} is not {type(b).__name__}")
    if isinstance(a, (list, tuple)):
        _equal(len(a), len(b), f"{where}: length")
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            _compare(left, right, f"{path}/{index}", atol, rtol, ignore)
    elif isinstance(a, (torch.Tensor, np.ndarray, float)):
        _close(a, b, where, atol, rtol)
    else:
        _equal(a, b, where)


def _close(a: Any, b: Any, where: str, atol: float, rtol: float) -> None:
    if isinstance(a, np.ndarray):
        _equal((a.dtype, a.shape), (b.dtype, b.shape), where)
        inexact = np.issubdtype(a.dtype, np.inexact)
        if not (np.allclose(a, b, atol=atol, rtol=rtol, equal_nan=True) if inexact else np.array_equal(a, b)):
            raise AssertionError(f"{where}: {a!r} is not {b!r}")
        return
    torch.testing.assert_close(
        a,
        b,
        atol=atol,
        rtol=rtol,
        equal_nan=True,
        check_device=False,
        msg=lambda message: f"{where}: {message}",
    )


def _equal(a: Any, b: Any, where: str) -> None:
    if a != b:
        raise AssertionError(f"{where}: {a!r} is not {b!r}")
