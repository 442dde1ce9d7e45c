"""The cost of methods: times of runs that alternate with plain in a process, an evaluation, and memory."""

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
class Round:
    """The measures of one process: of plain, of plain again, and of each method, in this order.

    Attributes:
        seconds: Times of their runs by the CPU's clock; on a GPU by the wall clock.
        wall_seconds: The same by the wall clock.
        evaluation: Times of an evaluation of each.
        memory: Bytes that training needs.
    """

    seconds: list[float]
    wall_seconds: list[float]
    evaluation: list[float]
    memory: list[int]


@dataclass(frozen=True)
class StepTime:
    """Cost of a method, as ratios to plain, which runs twice: the two runs of plain say how much ratios vary here.

    Attributes:
        ratio: The ratio of the times of runs with as many steps, the median of all rounds.
            None: not measured, since the interval is too wide.
        low: Lower end of its interval, as wide as plain's ratio to itself and as the rounds.
        high: Upper end.
        wall_ratio: The ratio by the wall clock.
        against_itself: The range of the ratios of plain to plain.
        inference: The ratio of the times of an evaluation: 1 for a network that is evaluated like plain's.
        memory: The ratio of the bytes of weights, gradients, states of optimizers and algorithms, and activations that
            are kept for the backward pass.
        rounds: Seconds of plain, of plain again, and of the method, in each round.
    """

    ratio: float | None
    low: float
    high: float
    wall_ratio: float
    against_itself: tuple[float, float]
    inference: float
    memory: float
    rounds: list[list[float]]


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
    """Take turns of a few batches with the runs of other threads, and add up the times of the turns by both clocks."""

    def __init__(self, index: int, turns: _Turns, block: int) -> None:
        self._index, self._turns, self._block = index, turns, block
        self.seconds = self.wall_seconds = 0.0
        self._begin = (0.0, 0.0)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._wait(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self._block == 0:
            self._take(state)
            self._turns.pass_on(self._index)
            self._wait(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._take(state)

    def _wait(self, state: State) -> None:
        self._turns.wait(self._index)
        self._begin = _clocks(state.device.name)

    def _take(self, state: State) -> None:
        seconds, wall_seconds = _clocks(state.device.name)
        self.seconds += seconds - self._begin[0]
        self.wall_seconds += wall_seconds - self._begin[1]


def measure_round(
    task: Task, data: Any, plain: RunSpec, methods: Sequence[RunSpec], *, seed: int, block: int = 10
) -> Round:
    """Train plain, plain again and methods in turns, and return their times and what else they cost.

    The runs are whole ones with a quarter of the steps, because some methods change the cost of a step in the course of
    a run. Start nothing else meanwhile.

    Args:
        task: The task.
        data: Its loaded data.
        plain: A run of plain.
        methods: A run of each method with as many steps.
        seed: The seed of all runs; it also says which of them begins.
        block: Steps per turn.

    Raises:
        RuntimeError: A run failed.
    """
    short = [replace(spec, steps=max(1, spec.steps // _SHORTER), seed=seed) for spec in (plain, plain, *methods)]
    memory = [_training_bytes(task, data, spec) for spec in short[1:]]
    (seconds, wall_seconds), evaluation = _interleave(task, data, short, block)
    return Round(seconds, wall_seconds, evaluation, [memory[0], *memory])


def step_times(rounds: Sequence[Round]) -> list[StepTime]:
    """Return the ratios of methods to plain.

    Args:
        rounds: What processes measured of the same runs, at least one. What is the same in one process, such as where
            its memory lies, differs in another.
    """
    seconds, wall_seconds, evaluation, memory = (
        np.array([getattr(each, name) for each in rounds])  # shape (rounds, runs)
        for name in ("seconds", "wall_seconds", "evaluation", "memory")
    )
    ratios, wall_ratios = (times / times[:, :2].mean(axis=1, keepdims=True) for times in (seconds, wall_seconds))
    itself = seconds[:, 1] / seconds[:, 0]
    found = []
    for run in range(2, seconds.shape[1]):
        ratio = float(np.median(ratios[:, run]))
        width = float(np.exp(np.abs(np.log([*itself, *(ratios[:, run] / ratio)])).max()))
        found.append(
            StepTime(
                ratio=ratio if width <= _WIDEST else None,
                low=ratio / width,
                high=ratio * width,
                wall_ratio=float(np.median(wall_ratios[:, run])),
                against_itself=(float(itself.min()), float(itself.max())),
                inference=float(evaluation[:, run].min() / evaluation[:, 0].min()),
                memory=float(memory[0, run] / memory[0, 0]),
                rounds=seconds[:, [0, 1, run]].tolist(),
            )
        )
    return found


def _interleave(
    task: Task, data: Any, specs: Sequence[RunSpec], block: int
) -> tuple[tuple[list[float], list[float]], list[float]]:
    """Train runs in turns; return their times by both clocks, and those of an evaluation of each."""
    turns = _Turns(len(specs), specs[0].seed % len(specs))
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
            stack.enter_context(_run_of(task, data, spec, timer)) for spec, timer in zip(specs, timers, strict=True)
        ]
        threads = [threading.Thread(target=fit, args=(run[0], index)) for index, run in enumerate(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise RuntimeError(f"A run whose time is measured failed: {problems[0]}") from problems[0]
        evaluation: list[float] = []
        plain = _layout_of(runs[0][0].state.model)
        for (trainer, _, evaluated), spec in zip(runs, specs, strict=True):
            if evaluation and _layout_of(trainer.state.model) == plain and not acts_in_evaluation(spec.stack):
                evaluation.append(evaluation[0])  # by construction, whatever would be measured
                continue
            evaluator = Evaluator(label="time", dataloader=evaluated)
            trainer.eval(eval_dataloader=evaluator, subset_num_batches=1)  # the first batch loads libraries
            begin = _clocks(spec.device)
            trainer.eval(eval_dataloader=evaluator)
            evaluation.append(_clocks(spec.device)[0] - begin[0])
    return ([timer.seconds for timer in timers], [timer.wall_seconds for timer in timers]), evaluation


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


def measure_in_process(reference: str, folder: str | None, texts: Sequence[str], seed: int, file: str) -> None:
    """Measure a round of plain, the first of the specifications, and methods, and write it to a file as JSON.

    It is the target of a process, and waits until it is alone on this machine.
    """
    plain, *methods = (RunSpec.from_json(json.loads(text)) for text in texts)
    torch.set_num_threads(plain.threads)
    task = load_task(reference)
    data = task.data(Path(folder) if folder else None)
    try:
        with hold_machine(alone=True):
            values: Any = vars(measure_round(task, data, plain, methods, seed=seed))
    except RuntimeError as error:
        values = {"error": str(error)}
    write_atomically(Path(file), json.dumps(values))
