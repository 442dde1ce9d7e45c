"""The search for the microbatch size by several ranks at once, of which any may run out of memory at any moment.

A rank that ran out of memory does not arrive where the others exchange gradients, and they would wait for it until the
timeout. So a try exchanges nothing: every rank computes its gradients on its own, then all tell each other how it went,
through the host, and only what all of them completed is averaged. If memory ran out anywhere, all halve to the same
size and compute the same batch again.

The price of that, while the size is searched: gradients are exchanged after the backward pass and not during it, and
every pass has one exchange of three numbers per rank. It stays for the whole run, since a longer sequence may need more
memory than any before.

What follows the verdict is not tried again: a rank on which the exchange, AFTER_TRAIN_BATCH or the optimizer's step
runs out of memory raises, and the others hear of it where they next meet it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from composer.core import Evaluator, State
from composer.distributed._lost_ranks import is_communication
from composer.trainer._microbatch import TOO_LARGE, Before, Thrashing, empty_cache, is_cuda_oom, raise_if_of_cuda
from composer.trainer._parallel import SingleProcess

__all__ = ["LockStepSearch", "check_whole", "evaluating_together"]

_FITS, _TIGHT, _OUT_OF_MEMORY, _FAILED = range(4)  # what a rank says of its try; tight: it fits, but no more


class LockStepSearch:
    """`MicrobatchSearch` on every rank at once.

    Args:
        state: The run's state.
        parallel: The other ranks.
    """

    def __init__(self, state: State, parallel: SingleProcess) -> None:
        self._state, self._parallel = state, parallel
        self._before, self._thrashing = Before(state), Thrashing()

    def check(self) -> None:
        """Refuse what communicates within a forward pass.

        Raises:
            ValueError: The model synchronises batch statistics.
        """
        if self._parallel.world_size == 1:
            return
        for name, module in self._state.model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise ValueError(
                    f"`device_train_microbatch_size='auto'` must not be used on {self._parallel.world_size} ranks with "
                    f"`torch.nn.SyncBatchNorm` (`{name}`): its forward pass waits for ranks that may have run out of "
                    f"memory. Give a number, or use `torch.nn.BatchNorm2d`."
                )

    def run(self, attempt: Callable[[], None], samples: float) -> None:
        """Return when the attempt fitted on all ranks.

        Args:
            attempt: Splits the batch by `state.device_train_microbatch_size` and computes this rank's gradients
                without communicating.
            samples: This rank's samples in the batch.

        Raises:
            RuntimeError: One sample does not fit on some rank, or some rank failed for another reason.
        """
        self._before.note()
        while True:
            own = self._state.device_train_microbatch_size
            size = samples if own is None else own
            outcome = self._try(attempt)
            verdict = self._parallel.of_all_ranks((outcome, size, min(size, samples)))
            _raise_of_others(verdict, "the forward or backward pass of this batch")
            failed = _ranks(verdict, _OUT_OF_MEMORY)
            if not failed:
                self._relax(verdict)
                return
            self._before.restore()
            if max(verdict[rank][2] for rank in failed) <= 1:
                raise RuntimeError(
                    f"CUDA out of memory on {_named(failed)}: training does not fit even with "
                    f"`device_train_microbatch_size=1`. {TOO_LARGE}"
                )
            self._halve(verdict, failed)

    def _try(self, attempt: Callable[[], None]) -> int:
        """How it went on this rank."""
        try:
            attempt()
        except Exception as error:
            if isinstance(error, RuntimeError) and is_cuda_oom(error):
                return _OUT_OF_MEMORY
            if not is_communication(error):  # the others are not left waiting
                self._parallel.of_all_ranks((_FAILED, 0, 0))
            raise_if_of_cuda(error)
            raise
        return _TIGHT if self._thrashing.found() else _FITS

    def _halve(self, verdict: Sequence[Sequence[float]], ranks: Sequence[int], why: str = "out of memory") -> None:
        """Go to the next smaller size that makes a difference on one of these ranks; all ranks compute the same."""
        old = max(size for _, size, _ in verdict)
        new, largest = old, max(verdict[rank][2] for rank in ranks)
        while new >= largest:
            new = max(int(new / 2), 1)
        self._state.device_train_microbatch_size = new
        warnings.warn(
            f"CUDA {why} in training on {_named(ranks)}. `device_train_microbatch_size` goes from {_number(old)} to "
            f"{new} on all ranks.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _relax(self, verdict: Sequence[Sequence[float]]) -> None:
        """Split the next batches smaller if the allocator of any rank had to free its cache again and again."""
        ranks = [rank for rank in _ranks(verdict, _TIGHT) if verdict[rank][2] > 1]
        if ranks:
            self._halve(verdict, ranks, "nearly out of memory")
            empty_cache()


@contextmanager
def evaluating_together(evaluator: Evaluator, state: State, parallel: SingleProcess) -> Iterator[None]:
    """Around the batches of an evaluation by several ranks, each of which searches its microbatch size.

    Nothing is exchanged there, and ranks may have different numbers of batches; so each halves for itself, and at the
    end all take the smallest size, or end together.

    Args:
        evaluator: Its `device_eval_microbatch_size` is searched.
        state: The run's state.
        parallel: The other ranks.

    Raises:
        ValueError: The model is sharded.
        RuntimeError: One sample does not fit on some rank, or some rank failed for another reason.
    """
    check_whole("device_eval_microbatch_size", state)
    before = evaluator.device_eval_microbatch_size
    try:
        yield
    except Exception as error:
        if not is_communication(error):  # the others are not left waiting
            memory = isinstance(error, RuntimeError) and is_cuda_oom(error)
            parallel.of_all_ranks((_OUT_OF_MEMORY if memory else _FAILED, 0))
        raise
    size = evaluator.device_eval_microbatch_size
    assert size is not None, "the search starts from the loader's batch size"
    verdict = parallel.of_all_ranks((_FITS if size == before else _TIGHT, size))
    _raise_of_others(verdict, f"the evaluation of {evaluator.label!r}")
    failed = _ranks(verdict, _OUT_OF_MEMORY)
    if failed:
        raise RuntimeError(
            f"CUDA out of memory on {_named(failed)}: the evaluator {evaluator.label!r} does not fit even with "
            f"`device_eval_microbatch_size=1`. {TOO_LARGE}"
        )
    if _ranks(verdict, _TIGHT):
        evaluator.device_eval_microbatch_size = _number(min(each for _, each in verdict))


def check_whole(argument: str, state: State) -> None:
    """Refuse the search for a model that is divided among ranks.

    Raises:
        ValueError: It is.
    """
    if state.fsdp_config is not None:
        raise ValueError(
            f"`{argument}='auto'` must not be used with a sharded model: its forward pass waits for ranks that may "
            f"have run out of memory. Give a number."
        )


def _raise_of_others(verdict: Iterable[Sequence[float]], where: str) -> None:
    failed = _ranks(verdict, _FAILED)
    if failed:
        who = _named(failed)
        raise RuntimeError(f"{who.capitalize()} failed in {where}. See the log of {who} for the reason.")


def _ranks(verdict: Iterable[Sequence[float]], outcome: int) -> list[int]:
    return [rank for rank, numbers in enumerate(verdict) if numbers[0] == outcome]


def _number(size: float) -> float:
    return int(size) if size == int(size) else size


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
