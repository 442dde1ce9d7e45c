"""SGD with decoupled weight decay in one pass over the memory of the CPU: a function in C, compiled when first needed.

Torch's own operators take two passes, for its fused SGD knows no decay but the coupled one, and memory bounds a step.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import has_torch_function

__all__ = ["Numbers", "kernel", "update_"]

log = logging.getLogger("composer.optim.decoupled_weight_decay")

Kernel = Callable[..., int]

_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS = "-std=gnu11 -O3 -fPIC -shared -ffp-contract=off".split()
_MOST_SECONDS = 60  # for one run of the compiler
_DTYPES = (torch.float32, torch.float64)
_LEAST_MEAN = 4096  # elements per tensor: for fewer a second pass costs less than to look at every tensor here


class Numbers(NamedTuple):
    """The numbers of a step, of which `DecoupledSGDW` has the formula.

    Attributes:
        factor: What the decay leaves of the weights.
        lr: Learning rate.
        momentum: Momentum; 0 for none.
        dampening: Dampening of the momentum.
        nesterov: Use Nesterov momentum.
        maximize: Go up instead of down.
    """

    factor: float
    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool


def update_(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None], numbers: Numbers) -> list[int]:
    """Take a step with those tensors whose memory may be gone through directly, in place.

    They are plain float32 or float64 tensors on the CPU, dense, with the strides of their gradient and their buffer,
    and nothing that is written shares memory with anything else; the tensors are large enough on average for it to be
    worth while. On a processor with fused multiply-add they become, bit for bit, what the unfused step of torch's
    operators makes of them.

    Args:
        params: Parameters.
        grads: Their gradients.
        buffers: Their momentum buffers. With momentum, None is replaced by a new buffer.
        numbers: The numbers of the step.

    Returns:
        The indices of the others, which are left as they were; of all, if there is no kernel.
    """
    everything = list(range(len(params)))
    # With gradients enabled, autograd refuses such a step, and is to do so.
    if torch.is_grad_enabled() or sum(map(Tensor.numel, params)) < _LEAST_MEAN * len(params):
        return everything
    if torch._C._len_torch_dispatch_stack() or has_torch_function((*params, *grads, *buffers)):
        return everything  # somebody wants to see every operator
    fit: dict[torch.dtype, list[int]] = {dtype: [] for dtype in _DTYPES}
    left: list[int] = []
    for index, (param, grad, buffer) in enumerate(zip(params, grads, buffers, strict=True)):
        fits = _fits(param, grad, buffer if numbers.momentum else None)
        (fit[param.dtype] if fits else left).append(index)
    for indices in fit.values():
        if indices and not _run(params, grads, buffers, indices, numbers):
            left += indices
    return left


def _fits(param: Tensor, grad: Tensor, buffer: Tensor | None) -> bool:
    """Whether the memory holds the elements of all three, and nothing else, in the same order."""
    dtype, keys, plain = param.dtype, torch._C._dispatch_keys, _plain_keys()
    if dtype not in _DTYPES or keys(param).raw_repr() != plain or keys(grad).raw_repr() != plain:
        return False
    if buffer is not None and (keys(buffer).raw_repr() != plain or buffer.dtype != dtype):
        return False
    if grad.dtype != dtype or param.numel() != grad.numel() or (buffer is not None and buffer.numel() != param.numel()):
        return False
    if param.is_contiguous() and grad.is_contiguous() and (buffer is None or buffer.is_contiguous()):
        return True
    layout = param.shape, param.stride()
    others = (grad,) if buffer is None else (grad, buffer)
    return all((other.shape, other.stride()) == layout for other in others) and _is_dense(*layout)


@lru_cache(maxsize=1)
def _plain_keys() -> int:
    """The dispatch keys of a tensor that is no more than its memory on the CPU: no wrapper, no negated view."""
    with torch.inference_mode(False):
        return int(torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr())


@lru_cache(maxsize=1024)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without a gap and without a second use."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _run(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None], indices: list[int], numbers: Numbers
) -> bool:
    """Update tensors of one dtype that fit; False, and nothing done, without a kernel or if their memory is shared."""
    threads = torch.get_num_threads()
    runtime = _parallel() if threads > 1 else None
    function = kernel() if runtime is not None or threads == 1 else None
    if function is None:
        return False
    ours, theirs = [params[i] for i in indices], [grads[i] for i in indices]
    is_new = [0] * len(indices)
    momenta: list[Tensor] = []
    if numbers.momentum:
        for place, index in enumerate(indices):
            buffer = buffers[index]
            is_new[place] = int(buffer is None)
            momenta.append(torch.empty_like(theirs[place]) if buffer is None else buffer)
    table = array("Q", [p.data_ptr() for p in ours])
    table.extend([g.data_ptr() for g in theirs])
    table.extend([b.data_ptr() for b in momenta] or is_new)
    table.extend([p.numel() for p in ours])
    table.extend(is_new)
    address, _ = table.buffer_info()
    is_double = ours[0].dtype is torch.float64
    factor, lr, momentum, dampening, nesterov, maximize = numbers
    switches = bool(nesterov), bool(maximize)
    if not function(address, len(ours), is_double, factor, lr, momentum, 1 - dampening, *switches, runtime, threads):
        return False
    increment_version([*ours, *momenta])  # autograd must know of it, as it would of an operator
    for index, buffer in zip(indices, momenta, strict=False):  # there are none without momentum
        buffers[index] = buffer
    return True


@lru_cache(maxsize=1)
def _parallel() -> ctypes.c_void_p | None:
    """The function of torch's OpenMP runtime that runs another one on several threads; None if torch has none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return None


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """The function in C, compiled once per process, in less than a second; None, and a line in the log, if that fails.

    `CC` names the compiler, with options if need be; without it, the first found of `cc`, `gcc` and `clang` is used.
    """
    begin = time.perf_counter()
    try:
        function = _compiled(_compiler())
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.info("Fused DecoupledSGDW takes two passes over the weights on the CPU, not one: %s", reason)
        return None
    log.debug("Fused DecoupledSGDW: compiled its step on the CPU in %.2f s.", time.perf_counter() - begin)
    return function


def _compiler() -> list[str]:
    """The command of the C compiler."""
    if os.name != "posix":
        raise FileNotFoundError("it is compiled on POSIX systems only.")
    named = shlex.split(os.environ.get("CC", ""))
    for program in named[:1] or _COMPILERS:
        path = shutil.which(program)
        if path is not None:
            return [path, *named[1:]]
    raise FileNotFoundError(f"no C compiler was found, looked for {', '.join(named[:1] or _COMPILERS)}.")


def _compiled(compiler: list[str]) -> Kernel:
    """Compile and load the function. Nothing of it stays on the disk, where others might find or change it."""
    source = Path(__file__).with_name("_sgdw_kernel.c")
    with tempfile.TemporaryDirectory(prefix="composer-sgdw-") as directory:
        library = str(Path(directory, "kernel.so"))
        command = [*compiler, *_OPTIONS, str(source), "-o", library]
        try:
            _call([*command, "-march=native"])
        except subprocess.CalledProcessError:  # not all compilers know the option
            _call(command)
        function = ctypes.CDLL(library).composer_sgdw  # a call to it lets other threads of Python run
    number, switch, pointer = ctypes.c_double, ctypes.c_int, ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_int64, switch, *[number] * 4, switch, switch, pointer, switch]
    function.restype = switch
    return function


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MOST_SECONDS)
