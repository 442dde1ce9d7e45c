"""The cost of methods: times of runs that alternate with plain in one process, an evaluation, and memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer.core import Callback, Evaluator, Event, State
from composer.evidence.methods import make_algorithms
from composer.evidence.run import RunSpec, hold_machine, make_trainer, write_atomically
from composer.evidence.task import Task, load_task
from composer.loggers import Logger

_WIDEST = 1.1  # the largest factor between a ratio and an end of its interval
_COUNTED_STEPS = 3  # in which memory is counted
_AROUND_EVALUATION = frozenset(
    {Event.EVAL_STANDALONE_START, Event.EVAL_START, Event.EVAL_END, Event.EVAL_STANDALONE_END}
)
_SHORTER = 4  # how much shorter the runs are than those that are compared


@dataclass(frozen=True)
class StepTime:
    """Cost of a method, as ratios to plain, which runs twice: the two runs of plain say how much ratios vary here.

    Attributes:
        ratio: The ratio of the times of runs with as many steps, by the CPU's clock (on a GPU by the wall clock).
            None: not measured, since the interval is too wide.
        low: Lower end of its interval, as wide as plain's ratio to itself and as the repeats.
        high: Upper end.
        wall_ratio: The ratio by the wall clock.
        against_itself: The range of the ratios of plain to plain.
        inference: The ratio of the times of an evaluation: 1 for a network that is evaluated like plain's.
        memory: The ratio of the bytes of weights, gradients, states of optimizers and algorithms, and activations that
            are kept for the backward pass.
        seconds: Time of plain's run.
        repeats: Number of repeats.
    """

    ratio: float | None
    low: float
    high: float
    wall_ratio: float
    against_itself: tuple[float, float]
    inference: float
    memory: float
    seconds: float
    repeats: int


def acts_in_training(stack: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Return False if the algorithms of a stack only act at events of evaluation and prediction."""
    return _acts_at(stack, lambda event: not (event.is_eval or event.is_predict))


def acts_in_evaluation(stack: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Return True if an algorithm of a stack acts on the batches of an evaluation, not only around all of them."""
    return _acts_at(stack, lambda event: event.is_eval and event not in _AROUND_EVALUATION)


def _acts_at(stack: Sequence[tuple[str, Mapping[str, Any]]], chosen: Callable[[Event], bool]) -> bool:
    return any(each.events is None or any(map(chosen, each.events)) for each in make_algorithms(stack))


class _Turns:
    """Lets one of several threads run at a time, in turn."""

    def __init__(self, count: int, first: int) -> None:
        self._condition = threading.Condition()
        self._waiting = [*range(first, count), *range(first)]

    def wait(self, index: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting[0] == index)

    def pass_on(self, index: int, *, leave: bool = False) -> None:
        with self._condition:
            if leave:
                self._waiting.remove(index)
            else:
                self._waiting.append(self._waiting.pop(0))
            self._condition.notify_all()


class _TurnTimer(Callback):
    """Take turns of a few batches with the runs of other threads, and measure the time of each turn by both clocks."""

    def __init__(self, index: int, turns: _Turns, block: int) -> None:
        self._index, self._turns, self._block = index, turns, block
        self.times: list[tuple[float, float]] = []
        self._begin = (0.0, 0.0)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._wait(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self._block == 0:
            self._take(state)
            self._turns.pass_on(self._index)
            self._wait(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self._block:
            self._take(state)

    def _wait(self, state: State) -> None:
        self._turns.wait(self._index)
        self._begin = _clocks(state.device.name)

    def _take(self, state: State) -> None:
        now = _clocks(state.device.name)
        self.times.append((now[0] - self._begin[0], now[1] - self._begin[1]))


def step_times(
    task: Task, data: Any, plain: RunSpec, methods: Sequence[RunSpec], *, repeats: int = 3, block: int = 10
) -> list[StepTime]:
    """Train plain, plain again and methods in turns, and return the ratios of their times to plain's.

    The runs are whole ones with a quarter of the steps, because some methods change the cost of a step in the course of
    a run. Start nothing else meanwhile.

    Args:
        task: The task.
        data: Its loaded data.
        plain: A run of plain.
        methods: A run of each method with as many steps.
        repeats: Number of rounds.
        block: Steps per turn.

    Raises:
        RuntimeError: A run failed.
    """
    short = [replace(spec, steps=max(1, spec.steps // _SHORTER)) for spec in (plain, plain, *methods)]
    rounds = [_interleave(task, data, short, block, seed) for seed in range(repeats)]
    # Of each turn the median of the rounds, summed over turns: shape (runs, clocks).
    totals = np.median([times for times, _ in rounds], axis=0).sum(axis=1)
    sums = np.stack([times.sum(axis=1)[:, 0] for times, _ in rounds])  # shape (rounds, runs)
    evaluated = np.min([seconds for _, seconds in rounds], axis=0)
    base, bases = totals[:2].mean(axis=0), sums[:, :2].mean(axis=1)
    itself, memory = sums[:, 1] / sums[:, 0], _training_bytes(task, data, plain)
    found = []
    for run, method in enumerate(methods, start=2):
        ratio, wall_ratio = (totals[run] / base).tolist()
        spread = np.concatenate([itself, sums[:, run] / bases / ratio])
        width = float(np.exp(np.abs(np.log(spread)).max()))
        found.append(
            StepTime(
                ratio=ratio if width <= _WIDEST else None,
                low=ratio / width,
                high=ratio * width,
                wall_ratio=wall_ratio,
                against_itself=(float(itself.min()), float(itself.max())),
                inference=float(evaluated[run] / evaluated[0]),
                memory=_training_bytes(task, data, method) / memory,
                seconds=float(base[0]),
                repeats=repeats,
            )
        )
    return found


def _interleave(
    task: Task, data: Any, specs: Sequence[RunSpec], block: int, seed: int
) -> tuple[np.ndarray, Sequence[float]]:
    """Train runs in turns; return the times of their turns, shape (runs, turns, clocks), and of an evaluation each."""
    turns = _Turns(len(specs), seed % len(specs))
    timers = [_TurnTimer(index, turns, block) for index in range(len(specs))]
    problems: list[BaseException] = []

    def fit(trainer: Any, index: int) -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 -- raised below, by the thread that waits
            problems.append(error)
        finally:
            turns.pass_on(index, leave=True)

    with ExitStack() as stack:
        runs = [
            stack.enter_context(_run_of(task, data, replace(spec, seed=seed), timer))
            for spec, timer in zip(specs, timers, strict=True)
        ]
        threads = [threading.Thread(target=fit, args=(run[0], index)) for index, run in enumerate(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise RuntimeError(f"A run whose time is measured failed: {problems[0]}") from problems[0]
        seconds: list[float] = []
        plain = _layout_of(runs[0][0].state.model)
        for (trainer, _, evaluated), spec in zip(runs, specs, strict=True):
            if seconds and _layout_of(trainer.state.model) == plain and not acts_in_evaluation(spec.stack):
                seconds.append(seconds[0])  # by construction, whatever would be measured
                continue
            evaluator = Evaluator(label="time", dataloader=evaluated)
            trainer.eval(eval_dataloader=evaluator, subset_num_batches=1)  # the first batch loads libraries
            begin = _clocks(spec.device)
            trainer.eval(eval_dataloader=evaluator)
            seconds.append(_clocks(spec.device)[0] - begin[0])
    return np.array([timer.times for timer in timers]), seconds


def _layout_of(model: torch.nn.Module) -> list[Any]:
    """Return what the time of a forward pass depends on: two networks with an equal result take the same time."""
    return [
        (
            *(type(module), module.training, "forward" in vars(module)),
            *(len(module._forward_hooks), len(module._forward_pre_hooks)),
            {
                name: (tensor.shape, tensor.stride(), tensor.dtype)
                for name, tensor in module._parameters.items()
                if tensor is not None
            },
        )
        for module in model.modules()
    ]


def _run_of(task: Task, data: Any, spec: RunSpec, callback: Callback) -> AbstractContextManager[tuple[Any, Any, Any]]:
    # An untrained teacher takes the same time and memory.
    return make_trainer(task, data, spec, partial(task.variants[spec.variant].model, data), callbacks=[callback])


class _Activations(Callback):
    """Count the bytes that autograd keeps for the backward pass: the most of all forward passes."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}
        self.most = 0

    def before_forward(self, state: State, logger: Logger) -> None:
        self._kept.clear()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            self._kept[storage.data_ptr()] = storage.nbytes()
            self.most = max(self.most, sum(self._kept.values()))
        return tensor


def _training_bytes(task: Task, data: Any, spec: RunSpec) -> int:
    """Return the bytes that a run needs, counted in its first steps."""
    activations = _Activations()
    short = replace(spec, steps=min(_COUNTED_STEPS, spec.steps))
    with _run_of(task, data, short, activations) as (trainer, _, _):
        with torch.autograd.graph.saved_tensors_hooks(activations.keep, lambda tensor: tensor):
            trainer.fit()
        state = trainer.state
        parts = [
            [each for each in state.model.parameters() for _ in range(2 if each.requires_grad else 1)],
            list(state.model.buffers()),
            [optimizer.state_dict() for optimizer in state.optimizers],
            [algorithm.state_dict() for algorithm in state.algorithms],
        ]
        return activations.most + sum(tensor.nbytes for tensor in _tensors(parts))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _clocks(device: str) -> tuple[float, float]:
    """Return the times of the clock that counts and of the wall clock."""
    if device == "gpu":
        torch.cuda.synchronize()
        return time.perf_counter(), time.perf_counter()
    return time.process_time(), time.perf_counter()


def measure_in_process(reference: str, folder: str | None, texts: Sequence[str], repeats: int, file: str) -> None:
    """Measure ratios of methods to plain, the first of the specifications, and write them to a file as JSON.

    It is the target of a process, and waits until it is alone on this machine.
    """
    plain, *methods = (RunSpec.from_json(json.loads(text)) for text in texts)
    torch.set_num_threads(plain.threads)
    task = load_task(reference)
    data = task.data(Path(folder) if folder else None)
    try:
        with hold_machine(alone=True):
            values: Any = [vars(each) for each in step_times(task, data, plain, methods, repeats=repeats)]
    except RuntimeError as error:
        values = {"error": str(error)}
    write_atomically(Path(file), json.dumps(values))
