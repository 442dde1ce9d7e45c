"""`compute_chunked_cross_entropy` against `linear` and `cross_entropy` of torch, which need all logits."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.chunked_cross_entropy import compute_chunked_cross_entropy
from composer.algorithms.chunked_cross_entropy import loss as module
from composer.utils import MissingConditionalImportError


def tensors(
    tokens: int = 7, width: int = 4, classes: int = 11, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, width), (classes, width), (classes,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    targets = torch.randint(classes, (tokens,), generator=generator)
    return *(tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)), targets  # type: ignore[return-value]


def with_all_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counts = targets != ignore_index
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if not z_loss:
        return F.cross_entropy(logits, targets, reduction=reduction, **options)
    losses = F.cross_entropy(logits, targets, reduction="none", **options)
    losses = losses + z_loss * torch.where(counts, logits.logsumexp(1) ** 2, 0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum()}[reduction]


def value_and_gradients(
    loss: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor | None, ...], **options: Any
) -> list[torch.Tensor]:
    hidden, weight, bias, targets = inputs
    value = loss(hidden, weight, targets, bias=bias, **options)
    wanted = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return [value.detach(), *torch.autograd.grad(value, wanted, upstream)]


def test_the_function_is_registered() -> None:
    assert compute_chunked_cross_entropy is cf.compute_chunked_cross_entropy


@settings(deadline=None, max_examples=100)
@given(
    tokens=st.integers(1, 20),
    width=st.integers(1, 6),
    classes=st.integers(2, 30),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    chunk_size=st.sampled_from([None, 1, 3, 64]),
    has_bias=st.booleans(),
    ignored=st.integers(0, 19),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_those_with_all_logits(
    tokens: int, width: int, classes: int, has_bias: bool, ignored: int, seed: int, **options: Any
) -> None:
    hidden, weight, bias, targets = tensors(tokens, width, classes, seed=seed)
    targets[: min(ignored, tokens - 1)] = -100
    inputs = (hidden, weight, bias if has_bias else None, targets)
    expected = value_and_gradients(with_all_logits, inputs, **options)
    actual = value_and_gradients(compute_chunked_cross_entropy, inputs, **options)

    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_float32_is_as_exact_as_all_logits() -> None:
    inputs = tensors(300, 32, 1000, dtype=torch.float32)
    exact = value_and_gradients(with_all_logits, tensors(300, 32, 1000))
    for chunk_size in (None, 16):
        actual = value_and_gradients(compute_chunked_cross_entropy, inputs, chunk_size=chunk_size)

        # Three products of at most 1000 terms in float32, with random signs: some units of 6e-8.
        assert all(relative_error(one, other) < 1e-6 for one, other in zip(actual, exact, strict=True))


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("chunk_size", [4, 256])
def test_the_gradient_of_a_weight_in_bf16_is_summed_in_float32(chunk_size: int) -> None:
    """With a sum in bf16 the error grows with the number of chunks, to over 1 % here."""
    plain = tensors(512, 16, 50, dtype=torch.bfloat16)
    double = tuple(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in plain[:3])
    exact = value_and_gradients(with_all_logits, (*double, plain[3]))
    actual = value_and_gradients(compute_chunked_cross_entropy, plain, chunk_size=chunk_size)

    assert [torch.float32, *[torch.bfloat16] * 3] == [tensor.dtype for tensor in actual]
    # Rounded to 8 bits: logits, their gradients, the product of each chunk and the result, 2^-9 each.
    assert all(relative_error(one, other) < 4 * 2**-9 for one, other in zip(actual, exact, strict=True))


def test_autocast_computes_logits_in_its_dtype_and_returns_float32_gradients() -> None:
    hidden, weight, bias, targets = tensors(64, 16, 50, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = value_and_gradients(compute_chunked_cross_entropy, (hidden, weight, bias, targets), chunk_size=8)
        expected = value_and_gradients(with_all_logits, (hidden, weight, bias, targets))

    assert {torch.float32} == {tensor.dtype for tensor in actual}
    assert not torch.equal(actual[0], value_and_gradients(with_all_logits, (hidden, weight, bias, targets))[0])
    assert all(relative_error(one, other.double()) < 4 * 2**-9 for one, other in zip(actual, expected, strict=True))


def test_autocast_leaves_float64_as_it_is() -> None:
    inputs = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        actual = value_and_gradients(compute_chunked_cross_entropy, inputs)

    torch.testing.assert_close(actual, value_and_gradients(compute_chunked_cross_entropy, inputs))


def test_leading_dimensions_are_those_of_tokens() -> None:
    hidden, weight, _, targets = tensors(6)
    each = compute_chunked_cross_entropy(hidden.view(2, 3, 4), weight, targets.view(2, 3), reduction="none")

    torch.testing.assert_close(F.cross_entropy(hidden @ weight.T, targets, reduction="none").view(2, 3), each)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_tokens_that_count_it_is_zero_and_so_are_its_gradients(reduction: str) -> None:
    hidden, weight, bias, targets = tensors()
    found = value_and_gradients(
        compute_chunked_cross_entropy, (hidden, weight, bias, torch.full_like(targets, 3)), ignore_index=3
    )
    empty = value_and_gradients(
        compute_chunked_cross_entropy, (hidden[:0], weight, bias, targets[:0]), reduction=reduction
    )

    assert not any(tensor.any() for tensor in (*found, *empty))


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    hidden, weight, bias, targets = tensors()
    for tensor in (weight, bias):
        tensor.requires_grad_(False)
    for reduction in ("mean", "none"):
        loss = compute_chunked_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
        hidden.grad = None
        loss.sum().backward()

        assert hidden.grad is not None
        assert weight.grad is None
    with torch.no_grad():
        assert compute_chunked_cross_entropy(hidden, weight, targets).grad_fn is None


def test_a_tied_weight_adds_both_gradients() -> None:
    tokens = torch.tensor([1, 4, 2, 0])

    def gradient(loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        embedding = torch.nn.Embedding.from_pretrained(tensors()[1].detach(), freeze=False)
        loss(embedding(tokens).tanh(), embedding.weight, tokens.roll(1)).backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    torch.testing.assert_close(gradient(with_all_logits), gradient(compute_chunked_cross_entropy))


def test_no_tensor_is_as_large_as_the_logits() -> None:
    hidden, weight, _, targets = tensors(256, 4, 64)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in (out if isinstance(out, tuple) else (out,)) if hasattr(part, "numel"))
            return out

    for reduction in ("mean", "none"):
        with Sizes():
            compute_chunked_cross_entropy(hidden, weight, targets, reduction=reduction).sum().backward()

    assert max(sizes) == hidden.numel()  # 16 tokens of 64 classes, which is N H / V


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((16384, 4096, 32000), 2048), ((8192, 768, 50257), 256), ((100, 8, 4), 128), ((1, 1, 50), 1)],
)
def test_the_size_of_chunks_follows_the_paper(sizes: tuple[int, int, int], expected: int) -> None:
    assert expected == module._default_chunk_size(*sizes)


def test_inputs_are_not_modified() -> None:
    inputs = tensors()
    before = [tensor.clone() for tensor in inputs]
    value_and_gradients(compute_chunked_cross_entropy, inputs, softcap=2.0)

    assert all(torch.equal(one, other) for one, other in zip(before, inputs, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_cannot_be_differentiated(reduction: str) -> None:
    hidden, weight, _, targets = tensors()
    loss = compute_chunked_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="Gradients of the chunked loss cannot be differentiated"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, _, targets = tensors()
    loss = compute_chunked_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"must have one backward pass: .*instead of using `retain_graph=True`"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.6 does so itself
def test_it_compiles_to_one_graph() -> None:
    hidden, weight, bias, targets = tensors()
    cases: list[dict[str, Any]] = [{}, {"reduction": "none", "softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1}]
    for options in cases:
        torch.compiler.reset()  # torch 2.6 takes one `partial` of a function for another
        loss = partial(compute_chunked_cross_entropy, chunk_size=3, **options)
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        expected = value_and_gradients(loss, (hidden, weight, bias, targets))
        actual = value_and_gradients(compiled, (hidden, weight, bias, targets))

        torch.testing.assert_close(actual, expected)


# ---- the kernel of liger, which needs a GPU: a stand-in shows what it is called with ----


class Liger(torch.nn.Module):
    """With the interface of `LigerFusedLinearCrossEntropyLoss`, computed with all logits."""

    calls: list[dict[str, Any]]

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.calls.append({"accum_dtype": accum_dtype, "reduction": reduction})
        self.options = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": lse_square_scale,
            "softcap": softcap,
            "reduction": reduction,
        }

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return with_all_logits(_input, lin_weight, target, bias=bias, **self.options)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(Liger, "calls", calls, raising=False)
    stand_in = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Liger)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=stand_in))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)  # type: ignore[arg-type]
    return calls


def test_the_kernel_of_liger_gets_the_arguments(liger: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(dtype=torch.float32)
    inputs[3][2] = 9
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.2, "softcap": 3.0, "ignore_index": 9}
    expected = value_and_gradients(compute_chunked_cross_entropy, inputs, **options)
    monkeypatch.setattr(module, "_uses_liger", lambda *args: True)

    torch.testing.assert_close(value_and_gradients(compute_chunked_cross_entropy, inputs, **options), expected)
    assert [{"accum_dtype": torch.float32, "reduction": "sum"}] == liger


def test_the_stand_in_has_the_interface_of_liger() -> None:
    transformers = pytest.importorskip("liger_kernel.transformers", reason="liger_kernel is not installed")
    actual = inspect.signature(transformers.LigerFusedLinearCrossEntropyLoss).parameters

    assert [*inspect.signature(Liger).parameters] == [*actual][: len(inspect.signature(Liger).parameters)]


def test_the_kernel_is_chosen_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: Any = SimpleNamespace(device=torch.device("cuda"))
    for installed in (None, object()):
        monkeypatch.setattr(module, "find_spec", lambda name, found=installed: found)
        is_there = installed is not None

        assert is_there == module._uses_liger(None, cuda, torch.bfloat16, "mean", None)
        assert not module._uses_liger("torch", cuda, torch.bfloat16, "mean", None)
        assert not module._uses_liger(None, cuda, torch.float64, "mean", None)
        assert not module._uses_liger(None, cuda, torch.bfloat16, "none", None)
        assert not module._uses_liger(None, cuda, torch.bfloat16, "mean", 64)
        assert not module._uses_liger(None, torch.zeros(1), torch.bfloat16, "mean", None)
        assert module._uses_liger("liger", cuda, torch.bfloat16, "mean", None)


def test_a_missing_liger_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_uses_liger", lambda *args: True)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)  # type: ignore[arg-type]
    hidden, weight, _, targets = tensors()
    with pytest.raises(MissingConditionalImportError, match="liger-kernel"):
        compute_chunked_cross_entropy(hidden, weight, targets)


# ---- what is refused ----

HIDDEN, WEIGHT, TARGETS = torch.zeros(2, 3, 4), torch.zeros(9, 4), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reduction": "max"}, ValueError, "`reduction` must be one of 'mean', 'sum', 'none', got 'max'"),
        ({"label_smoothing": 1.5}, ValueError, r"`label_smoothing` must be in \[0, 1\], got 1.5"),
        ({"z_loss": -1.0}, ValueError, "`z_loss` must not be negative, got -1.0"),
        ({"softcap": 0.0}, ValueError, "`softcap` must be positive, got 0.0"),
        ({"chunk_size": 0}, ValueError, "`chunk_size` must be at least 1, got 0"),
        ({"ignore_index": 0.5}, TypeError, "`ignore_index` must be an integer, got 0.5"),
        ({"kernel": "triton"}, ValueError, "`kernel` must be one of None, 'torch', 'liger', got 'triton'"),
        ({"kernel": "liger"}, ValueError, "does not support tensors on the device 'cpu'"),
        ({"targets": TARGETS[0]}, ValueError, r"`targets` must have one index per token, shape \(2, 3\).*got \(3,\)"),
        ({"targets": HIDDEN}, TypeError, "`targets` must be class indices of dtype torch.int64, got torch.float32"),
        ({"weight": WEIGHT.T}, ValueError, r"`weight` must have shape \(V, 4\).*got \(4, 9\)"),
        ({"weight": WEIGHT.double()}, ValueError, "must have one dtype, got torch.float32, torch.float64"),
        ({"bias": torch.zeros(4)}, ValueError, r"`bias` must have shape \(9,\).*got \(4,\)"),
        ({"targets": TARGETS + 9}, (IndexError, RuntimeError), "index"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        compute_chunked_cross_entropy(**{"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, **arguments})


def test_a_shard_of_a_weight_is_refused() -> None:
    shard: Any = SimpleNamespace(to_local=lambda: WEIGHT[:3])
    with pytest.raises(TypeError, match=r"`weight` must be a plain tensor, got a `DTensor` of local shape \(3, 4\)"):
        compute_chunked_cross_entropy(HIDDEN, shard, TARGETS)
