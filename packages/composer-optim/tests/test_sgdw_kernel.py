"""The single pass of fused `DecoupledSGDW` on the CPU computes what the operators of torch do, or leaves it to them."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from composer.optim import DecoupledSGDW, _sgdw_kernel

NUMBERS = _sgdw_kernel.Numbers(factor=0.5, lr=0.25, momentum=0.5, dampening=0.0, nesterov=False, maximize=False)
OPTIONS: dict[str, Any] = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the kernel updated; tensors of any size are worth one."""
    real = _sgdw_kernel.kernel()
    if real is None:
        pytest.skip("there is no C compiler")
    counts: list[int] = []

    def counting(*arguments: Any) -> int:
        done = real(*arguments)
        if done:
            counts.append(arguments[1])
        return done

    monkeypatch.setattr(_sgdw_kernel, "kernel", lambda: counting)
    monkeypatch.setattr(_sgdw_kernel, "_LEAST_MEAN", 0)
    return counts


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal bits where torch uses fused multiply-add, as the kernel does."""
    assert len(ours) == len(theirs)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    torch.testing.assert_close(ours, theirs)


def tensors(shapes: list[tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and momentum buffers."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    buffers = [optimizer.state[p].get("momentum_buffer") for p in params]
    return [p.detach() for p in params] + [b for b in buffers if b is not None]


def steps(optimizer: torch.optim.Optimizer, which: range = range(3)) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in which:
        for index, p in enumerate(params):
            if p.requires_grad:
                p.grad = torch.empty_like(p).copy_(tensors([tuple(p.shape)], 100 * step + index, p.dtype)[0])
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.7


def both(params: list[Tensor], **options: Any) -> tuple[DecoupledSGDW, DecoupledSGDW]:
    """The same optimizer twice: fused, and one operator after the other."""
    mine, others = ([torch.nn.Parameter(p.clone()) for p in params] for _ in range(2))
    options = {**OPTIONS, **options}
    return DecoupledSGDW(mine, **options, fused=True), DecoupledSGDW(others, **options, foreach=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3, 1.0]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    weight_decay=st.floats(1e-6, 0.5),
)
def test_it_computes_what_the_unfused_step_does(
    calls: list[int],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    momentum: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    weight_decay: float,
) -> None:
    nesterov = nesterov and momentum > 0
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    ours, theirs = both(tensors(shapes, dtype=dtype), dampening=0.0 if nesterov else dampening, **options)
    calls.clear()
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["maximize"] = maximize
        steps(optimizer)

    same(state(ours), state(theirs))
    assert [len(shapes)] * 3 == calls


def test_it_goes_through_dense_memory_in_any_order(calls: list[int]) -> None:
    params = [
        torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 5, 2, 2).to(memory_format=torch.channels_last_3d),
        torch.randn(6, 4).t(),
        torch.randn(2, 1, 3).permute(2, 0, 1),
    ]
    ours, theirs = both(params)
    steps(ours)
    steps(theirs)

    same(state(ours), state(theirs))
    assert [4] * 3 == calls
    assert [p.stride() for p in params] == [p.stride() for p in ours.param_groups[0]["params"]]
    assert [p.stride() for p in params] == [b.stride() for b in state(ours)[4:]]


def test_groups_keep_their_own_numbers_and_what_has_no_gradient_stays(calls: list[int]) -> None:
    results = []
    for path in ({"fused": True}, {"foreach": False}):
        params = [torch.nn.Parameter(p) for p in tensors([(3,), (), (0, 2), (5, 5), (2,)])]
        params[4].requires_grad_(False)
        groups = [{"params": params[:2], "weight_decay": 0.3}, {"params": params[2:], "lr": 0.01, "momentum": 0.0}]
        optimizer = DecoupledSGDW(groups, **OPTIONS, **path)  # type: ignore[arg-type]
        steps(optimizer)
        results.append(state(optimizer))

    same(*results)
    assert torch.equal(results[0][4], tensors([(3,), (), (0, 2), (5, 5), (2,)])[4])
    assert [2, 2] * 3 == calls


def test_dtypes_are_told_apart_and_the_rest_is_left_to_torch(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    params = [tensors([(7,)], dtype=dtype)[0] for dtype in dtypes]
    ours, theirs = both(params)[0], both(params)[0]
    steps(ours)
    monkeypatch.setattr(_sgdw_kernel, "kernel", lambda: None)
    steps(theirs)

    torch.testing.assert_close(state(ours), state(theirs))
    assert [2, 1] * 3 == calls


def test_a_buffer_begins_with_its_first_gradient(calls: list[int]) -> None:
    ours, theirs = both(tensors([(7,), (3, 3)]), dampening=0.4)
    for optimizer in (ours, theirs):
        late = optimizer.param_groups[0]["params"][1].requires_grad_(False)
        steps(optimizer, range(1))
        late.requires_grad_(True)
        steps(optimizer, range(1, 3))

    same(state(ours), state(theirs))
    assert [1, 2, 2] == calls


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_as_learning_rate_is_read(calls: list[int], shape: tuple[int, ...]) -> None:
    ours, _ = both(tensors([(7,)]))
    theirs, _ = both(tensors([(7,)]), lr=torch.full(shape, 0.3))
    steps(ours)
    steps(theirs)

    torch.testing.assert_close(state(ours), state(theirs))
    assert [1] * 6 == calls


def test_threads_change_no_bit(calls: list[int], threads: Callable[[int], None]) -> None:
    results = []
    for count in (1, 2, 3):
        threads(count)
        optimizer, other = both(tensors([(300, 301), (5,), (70_001,)]))
        steps(optimizer)
        results.append(state(optimizer))
    steps(other)

    for result in results:
        same(result, state(other))
    assert [3] * 9 == calls


def test_several_threads_without_the_runtime_of_torch_are_left_to_torch(
    calls: list[int], threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sgdw_kernel, "_parallel", lambda: None)
    threads(2)
    ours, theirs = both(tensors([(7,)]))
    steps(ours)
    steps(theirs)

    torch.testing.assert_close(state(ours), state(theirs))
    assert [] == calls


def test_a_process_without_openmp_has_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sgdw_kernel.ctypes, "CDLL", lambda name: object())

    assert _sgdw_kernel._parallel.__wrapped__() is None


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_checkpoint_goes_on_either_way(calls: list[int], fused_first: bool) -> None:
    pair = both(tensors([(3, 4), (5,)]))
    whole = both(tensors([(3, 4), (5,)]))[1]
    first, second = pair if fused_first else pair[::-1]
    steps(first, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for group in second.param_groups:
        group["fused"], group["foreach"] = not fused_first, fused_first and None
    for a, b in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
        a.data.copy_(b)
    steps(second, range(2, 4))
    steps(whole, range(4))

    same(state(second), state(whole))
    assert [2, 2] == calls


def test_autograd_notices_the_step(calls: list[int]) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = DecoupledSGDW([param], **OPTIONS, fused=True)
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    before = param._version, buffer._version
    optimizer.step()

    assert (param._version, buffer._version) > before
    assert [1, 1] == calls
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Subclass(torch.Tensor):
    pass


def freed() -> Tensor:
    tensor = torch.ones(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def from_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3)


def ones() -> Tensor:
    return torch.ones(2, 3)


ODD: dict[str, Callable[[], Tensor]] = {
    "another dtype": lambda: ones().bfloat16(),
    "a complex one": lambda: ones().to(torch.complex64),
    "a slice": lambda: torch.ones(2, 4)[:, :3],
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "another order": lambda: torch.ones(3, 2).t(),
    "negated": lambda: torch._neg_view(ones()),
    "zeros without memory": lambda: torch._efficientzerotensor((2, 3)),
    "from inference": from_inference,
    "sparse": lambda: ones().to_sparse(),
    "of another device": lambda: ones().to("meta"),
    "another size": lambda: torch.ones(2, 4),
    "another double": lambda: ones().double(),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("place", range(3))
def test_what_does_not_fit_is_left_as_it_was(calls: list[int], name: str, place: int) -> None:
    """Whether it is the parameter, the gradient or the buffer."""
    trio = [ones() for _ in range(3)]
    trio[place] = ODD[name]()
    with torch.no_grad():
        left = _sgdw_kernel.update_([ones(), trio[0]], [ones(), trio[1]], [None, trio[2]], NUMBERS)

    assert [1] == left
    assert all(torch.equal(t, ones()) for index, t in enumerate(trio) if index != place)
    assert [1] == calls


@pytest.mark.parametrize("place", range(3))
def test_a_subclass_sees_its_operators(calls: list[int], place: int) -> None:
    trio = [ones() for _ in range(3)]
    trio[place] = ones().as_subclass(Subclass)
    with torch.no_grad():
        left = _sgdw_kernel.update_(*([t] for t in trio), NUMBERS)  # type: ignore[arg-type]

    assert [0] == left
    assert [] == calls


@pytest.mark.parametrize("name", ["a slice", "expanded"])
def test_gaps_and_repetitions_do_not_fit_even_if_all_agree(calls: list[int], name: str) -> None:
    with torch.no_grad():
        left = _sgdw_kernel.update_([ODD[name]()], [ODD[name]()], [ODD[name]()], NUMBERS)

    assert [0] == left
    assert [] == calls


@pytest.mark.parametrize("place", range(3))
def test_memory_that_was_set_free_is_not_touched(calls: list[int], place: int) -> None:
    trio = [ones() for _ in range(3)]
    trio[place] = freed()
    with torch.no_grad():
        left = _sgdw_kernel.update_(*([t] for t in trio), NUMBERS)  # type: ignore[arg-type]

    assert [0] == left
    assert [] == calls


def test_an_empty_tensor_needs_no_memory(calls: list[int]) -> None:
    empty = torch.ones(0, 3)
    with torch.no_grad():
        left = _sgdw_kernel.update_([empty, ones()], [empty, ones()], [None, None], NUMBERS)

    assert [] == left
    assert [2] == calls


def test_views_of_one_storage_are_updated_unless_they_overlap(calls: list[int]) -> None:
    def left(first: slice, second: slice, of: int) -> list[int]:
        """What is left if the parameters, or the gradients, or parameter and gradient, are these slices of one."""
        memory = torch.ones(12)
        columns = [[torch.ones(6), torch.ones(6)] for _ in range(3)]
        columns[0][0] = memory[first]
        columns[of][1] = memory[second]
        with torch.no_grad():
            return _sgdw_kernel.update_(*columns, NUMBERS)  # type: ignore[arg-type]

    for column in range(3):
        assert [] == left(slice(0, 6), slice(6, 12), column)
        assert [0, 1] == left(slice(0, 6), slice(5, 11), column)
        assert [0, 1] == left(slice(5, 11), slice(0, 6), column)
        assert [0, 1] == left(slice(0, 6), slice(0, 6), column)
    assert [2] * 3 == calls


def test_gradients_may_share_memory(calls: list[int]) -> None:
    grad = ones()
    params = [ones(), ones()]
    with torch.no_grad():
        left = _sgdw_kernel.update_(params, [grad, grad], [None, None], NUMBERS)

    assert [] == left
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], torch.full((2, 3), 0.25))


def test_small_tensors_are_left_to_torch(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with torch.no_grad():
        left = _sgdw_kernel.update_([ones(), torch.ones(4000)], [ones(), torch.ones(4000)], [None, None], NUMBERS)

    assert [0, 1] == left


def test_large_tensors_are_worth_it_by_default(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with torch.no_grad():
        left = _sgdw_kernel.update_([ones(), torch.ones(9000)], [ones(), torch.ones(9000)], [None, None], NUMBERS)

    assert [] == left


def test_autograd_still_refuses_a_step_that_it_records(calls: list[int]) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    options: dict[str, Any] = {"momentum": 0.9, "lr": 0.1, "initial_lr": 0.1, "dampening": 0.0, "nesterov": False}
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        DecoupledSGDW.sgdw([param], [torch.ones(3)], [None], weight_decay=0.1, fused=True, **options)
    assert torch.equal(param, torch.ones(3))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operators(calls: list[int]) -> None:
    optimizer, _ = both(tensors([(3,)]))
    with Operators() as mode:
        steps(optimizer, range(1))

    assert {"_foreach_mul_", "_fused_sgd_"} <= set(mode.seen)
    assert [] == calls


def test_fake_tensors_and_those_of_transforms_are_left_to_torch(calls: list[int]) -> None:
    with FakeTensorMode(), torch.no_grad():
        assert [0] == _sgdw_kernel.update_([ones()], [ones()], [ones()], NUMBERS)

    def inside(batch: Tensor) -> Tensor:
        with torch.no_grad():
            assert [0] == _sgdw_kernel.update_([batch], [batch], [None], NUMBERS)
        return batch

    torch.func.vmap(inside)(ones())
    assert [] == calls


def test_a_compiled_step_is_left_to_torch(calls: list[int]) -> None:
    ours, theirs = both(tensors([(3,)]))
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    torch.compile(ours.step, backend="eager")()
    theirs.step()

    torch.testing.assert_close(state(ours), state(theirs))
    assert [] == calls


def test_gradient_scaling_is_left_to_torch(calls: list[int]) -> None:
    ours, theirs = both(tensors([(3,)]))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for optimizer, scale in ((ours, 8.0), (theirs, 1.0)):
        optimizer.param_groups[0]["params"][0].grad = torch.full((3,), scale)
    scaler.scale(torch.zeros(()))
    scaler.step(ours)
    theirs.step()

    torch.testing.assert_close(state(ours), state(theirs))
    assert [] == calls


@pytest.mark.parametrize("options", [{"fused": True, "weight_decay": 0.0}, {"foreach": True}, {"fused": False}, {}])
def test_who_does_not_need_it_does_not_pay_for_it(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(_sgdw_kernel, "_LEAST_MEAN", 0)
    monkeypatch.setattr(_sgdw_kernel, "kernel", lambda: pytest.fail("compiled for nothing"))
    optimizer = DecoupledSGDW([torch.nn.Parameter(torch.ones(3))], **{**OPTIONS, **options})

    steps(optimizer)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Each test compiles anew, in this directory."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(_sgdw_kernel, "_LEAST_MEAN", 0)
    monkeypatch.delenv("CC", raising=False)
    _sgdw_kernel.kernel.cache_clear()
    yield scratch
    _sgdw_kernel.kernel.cache_clear()


def compiler(directory: Path, script: str) -> str:
    path = directory.parent / "my compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"'{path}' -DNAMED"


def real_compiler() -> str:
    path = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if path is None:
        pytest.skip("there is no C compiler")
    return path


def check_fallback(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Two steps are those of torch, and one line of the log says why."""
    ours, theirs = both(tensors([(7,), (3, 3)]))
    with caplog.at_level(logging.INFO):
        steps(ours)
    steps(theirs)
    lines = [r.getMessage() for r in caplog.records if "two passes" in r.getMessage()]

    torch.testing.assert_close(state(ours), state(theirs))
    assert len(lines) == 1
    assert "Fused DecoupledSGDW takes two passes over the weights on the CPU, not one: " in lines[0]
    assert reason in lines[0]


def test_without_a_compiler_there_are_two_passes(
    compiling: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)

    check_fallback(caplog, "no C compiler was found, looked for cc, gcc, clang.")


def test_a_named_compiler_that_is_not_there_is_not_replaced(
    compiling: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/not/there -m64")

    check_fallback(caplog, "no C compiler was found, looked for /not/there.")


def test_other_systems_have_two_passes(
    compiling: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OtherSystem:
        name = "nt"

    monkeypatch.setattr(_sgdw_kernel, "os", OtherSystem)

    check_fallback(caplog, "POSIX systems only")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo this is no compiler >&2; exit 1", "this is no compiler"),
        ("exit 0", "kernel.so"),
        ('for last; do :; done; echo garbage > "$(dirname "$0")"/scratch/*/kernel.so', "kernel.so"),
        ("sleep 30", "timed out"),
    ],
)
def test_a_compiler_that_fails_means_two_passes(
    compiling: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler(compiling, script))
    monkeypatch.setattr(_sgdw_kernel, "_MOST_SECONDS", 0.3 if "sleep" in script else 60)

    check_fallback(caplog, reason)
    assert [] == os.listdir(compiling)


def test_a_directory_that_cannot_be_made_means_two_passes(
    compiling: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", real_compiler())
    monkeypatch.setattr(tempfile, "tempdir", str(compiling / "not there"))

    check_fallback(caplog, "No such file or directory")


def test_it_is_compiled_once_and_nothing_is_left_on_the_disk(
    compiling: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran = compiling.parent / "ran"
    script = f'echo "$@" >> {ran}\nexec {real_compiler()} "$@"'
    monkeypatch.setenv("CC", compiler(compiling, script))
    ours, theirs = both(tensors([(7,), (3, 3)]))
    with caplog.at_level(logging.DEBUG):
        steps(ours)
    steps(theirs)

    torch.testing.assert_close(state(ours), state(theirs))
    assert "compiled its step on the CPU in" in caplog.text
    assert len(ran.read_text().splitlines()) == 1
    assert ran.read_text().startswith("-DNAMED")
    assert [] == os.listdir(compiling)


def test_a_compiler_that_does_not_know_this_processor_is_asked_again(
    compiling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'case "$*" in *-march=native*) exit 1;; esac\nexec {real_compiler()} "$@"'
    monkeypatch.setenv("CC", compiler(compiling, script))
    ours, theirs = both(tensors([(7,), (3, 3)]))
    steps(ours)
    steps(theirs)

    torch.testing.assert_close(state(ours), state(theirs))
    assert _sgdw_kernel.kernel() is not None
