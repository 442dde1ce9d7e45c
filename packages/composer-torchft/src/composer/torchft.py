"""A strategy for replica groups that may die and return while the run goes on: torchft.

A replica group is one process with the whole model. The groups find each other through a Lighthouse, a small server of
torchft. Between two batches they ask it for a quorum, the groups that are alive, and after the backward pass these
average their gradients. If a group dies in between, the others repeat the exchange without it, with the gradients that
they still have, so that no batch is lost and none counts twice. A group that returns gets the state of the run from a
live one, as if it had loaded a checkpoint of this moment.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from composer.checkpoint.run import collect
from composer.checkpoint.safe_load import load_plain
from composer.core import Algorithm, State, TimeUnit, effects
from composer.devices import Device
from composer.trainer import Strategy
from composer.utils import dist, needs_closure, plain_int, reproducibility

_VARIABLES = {"groups": "NUM_REPLICA_GROUPS", "group": "REPLICA_GROUP_ID", "lighthouse": "TORCHFT_LIGHTHOUSE"}
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.5
_MAX_RETRIES = 20  # of one exchange: what fails as often is no death of a group
_MOVES_WEIGHTS = "It moves the weights within a step, when a group that joins may get them."
_REFUSED = {
    effects.CHANGES_BATCH_SIZE: "It divides the size of a batch among ranks, and knows no replica groups.",
    effects.DISPLACES_WEIGHTS: _MOVES_WEIGHTS,
    effects.WRAPS_OPTIMIZER: _MOVES_WEIGHTS,
}


def get_sampler(
    dataset: Sized, *, drop_last: bool = False, shuffle: bool = False, seed: int = 0, **config: Any
) -> DistributedSampler[Any]:
    """Return a sampler that gives each replica group its shard of a dataset.

    Args:
        dataset: The dataset; only its length is used.
        drop_last: Drop the tail instead of repeating samples, so that all shards have the same length.
        shuffle: Shuffle, in another order every epoch.
        seed: The seed of the shuffling; must be the same in all groups.
        **config: `groups` and `group`, as for `TorchFT`.

    Raises:
        ValueError: The number of groups or the index of this one is missing or wrong.
    """
    groups, group, _ = _read(config)
    return dist.get_sampler(dataset, drop_last=drop_last, shuffle=shuffle, num_replicas=groups, rank=group, seed=seed)


def _read(config: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the number of groups, the index of this one and the address of the Lighthouse.

    Raises:
        TypeError: `config` is not a dict.
        ValueError: An entry is unknown, missing or wrong.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"The configuration of torchft must be a dict, got {config!r}.")
    unknown = sorted(config.keys() - _VARIABLES.keys())
    if unknown:
        raise ValueError(f"The configuration of torchft has the entries {[*_VARIABLES]}, got {unknown}.")
    values = {key: config.get(key, os.environ.get(variable)) for key, variable in _VARIABLES.items()}
    texts = values["groups"], values["group"]
    groups, group = (int(each) if isinstance(each, str) and each.isdecimal() else plain_int(each) for each in texts)
    if groups is None or group is None or not 0 <= group < groups:
        raise ValueError(
            f"'groups' must be the number of replica groups, and 'group' the index of this one, from 0, got "
            f"{texts[0]!r} and {texts[1]!r}. Set the environment variables NUM_REPLICA_GROUPS and REPLICA_GROUP_ID, or "
            f"write `{{'torchft': {{'groups': 3, 'group': 0}}}}`."
        )
    return groups, group, values["lighthouse"] or ""


class TorchFT(Strategy):
    """Average gradients over the replica groups that are alive, by torchft.

    `Trainer(parallelism_config={"torchft": {}})`. Source: https://github.com/pytorch/torchft.

    Args:
        config: `groups`, the number of groups that the data is divided among; `group`, the index of this one, from 0;
            `lighthouse`, the address of the Lighthouse, such as "http://host:29510". What is left out is read from the
            environment variables NUM_REPLICA_GROUPS, REPLICA_GROUP_ID and TORCHFT_LIGHTHOUSE.

    Raises:
        TypeError: `config` is not a dict.
        ValueError: An entry is unknown, missing or wrong.
    """

    @property
    def is_distributed(self) -> bool:
        return True

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._groups, self._index, self._lighthouse = _read(config)
        if not self._lighthouse.startswith("http"):
            raise ValueError(
                f"'lighthouse' must be the address of a running `torchft_lighthouse`, such as 'http://host:29510', got "
                f"{self._lighthouse!r}. Give it here, or in the environment variable TORCHFT_LIGHTHOUSE."
            )
        self._manager: Any = None
        self._has_quorum = False  # a quorum has begun in which nothing has been averaged yet
        self._in_batch = False
        self._received: list[torch.Tensor] = []  # the state of a live group, if torchft has got it

    # ---- at construction ----

    def connect(self, device: Device, timeout: float) -> None:
        """Check that this process is a group of its own.

        Raises:
            ValueError: It was started with others.
        """
        if dist.get_world_size() > 1:
            raise ValueError(
                f"With torchft each process must be a replica group of its own, but {dist.get_world_size()} were "
                f"started together. Start each by itself, with its number in the environment variable REPLICA_GROUP_ID."
            )
        self._timeout, self._backend = timeout, device.dist_backend

    def refusal(self, algorithm: Algorithm) -> str | None:
        return next((reason for effect, reason in _REFUSED.items() if effect in algorithm.placement.provides), None)

    def check_loader(self, dataloader: Any, argument: str) -> None:
        """Check that a training loader has the part of the data that belongs to this group.

        Raises:
            ValueError: Its sampler divides the data differently, or it has none.
        """
        sampler = getattr(dataloader, "sampler", None)
        actual = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if argument == "train_dataloader" and actual != (self._groups, self._index):
            raise ValueError(
                f"`{argument}` must have a sampler with `num_replicas={self._groups}` and `rank={self._index}`, got "
                f"{actual[0]} and {actual[1]}: each replica group trains on its own part of the data. Use "
                f"`composer.torchft.get_sampler(dataset)`."
            )

    def shard(self, state: State) -> None:
        """Check what the groups could not do together.

        Raises:
            ValueError: The run ends by time or tokens, searches for a microbatch size, or has several exchanges of
                gradients in a step.
        """
        self._state = state
        if hasattr(state.model, "begin_turn") or any(map(needs_closure, state.optimizers)):
            kinds = ", ".join(type(each).__name__ for each in state.optimizers)
            raise ValueError(
                f"`optimizers` must step together after one backward pass with torchft, without closures or turns, got "
                f"{kinds}: a group may join whenever gradients are averaged."
            )
        limit = state.max_duration
        if limit is not None and limit.unit in (TimeUnit.TOKEN, TimeUnit.SECOND):
            raise ValueError(
                f"`max_duration` must be in epochs, batches or samples with torchft, got {str(limit)!r}: the groups "
                f"count tokens and seconds differently, and must end at the same step."
            )
        if state.auto_microbatching:
            raise ValueError(
                "`device_train_microbatch_size` must not be 'auto' with torchft: the other groups would wait for the "
                "search. Give a number."
            )

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        """Join the other groups, and load the state of a live one; return the model.

        Raises:
            TimeoutError: The run would begin, and not all groups have come within `dist_timeout`.
        """
        self._model = model
        self._connect_groups()
        self._join()
        # Groups draw different random numbers, as ranks do.
        reproducibility.seed_all((self._state.seed + self._index) % (reproducibility.MAX_SEED + 1))
        return model

    def _connect_groups(self) -> None:
        """Start what exchanges values with the other groups; from now on they wait for this one."""
        os.environ.setdefault("RUST_LOG", "error")  # torchft logs several lines per step otherwise
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        timeout, host = timedelta(seconds=self._timeout), socket.gethostname()

        class Gloo(ProcessGroupGloo):  # type: ignore[misc]  # it has no types
            """Waits for a slow group, but only some seconds for one that dies while connections are made."""

            def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
                opts.timeout = timeout
                return super().allreduce(tensors, opts)

        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        soon = timedelta(seconds=min(self._timeout, _CONNECT_SECONDS))
        self._replicas = ProcessGroupNCCL(timeout) if self._backend == "nccl" else Gloo(soon)
        self._manager = Manager(
            pg=self._replicas,
            load_state_dict=self._received.append,
            state_dict=self._send,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
            quorum_retries=1,  # so that a Lighthouse that is started again is found
            max_retries=_MAX_RETRIES,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=self._lighthouse,
            replica_id=f"group{self._index}",
        )

    def _join(self) -> None:
        """Wait for the quorum in which this group begins, and load the state that it gets there.

        The steps that torchft counts are one more than the batches of the run, because torchft copies the state of one
        group to all others at its step 0.
        """
        manager, begun = self._manager, self._state.timestamp.batches
        if begun:
            manager.load_state_dict({"step": begun + 1, "batches_committed": 0})
        deadline = time.monotonic() + self._timeout
        while True:
            self._received.clear()
            manager.start_quorum()
            here, step = manager.num_participants(), manager.current_step()
            if manager.errored() is None and (step > 0 or here == self._groups):
                break
            if time.monotonic() > deadline:
                failure = manager.errored()
                raise TimeoutError(
                    f"The run begins when all {self._groups} replica groups are there, but only {here} have come "
                    f"within {self._timeout:g} s. Start the others, or increase `dist_timeout`."
                ) from (None if failure is None else failure.original_exception)
            time.sleep(_POLL_SECONDS)
        self._has_quorum = True
        if step == 0:
            manager.load_state_dict({"step": 1, "batches_committed": 0})
        if self._received:
            self._load(self._received.pop(), begins=step == 0)

    def _load(self, received: torch.Tensor, begins: bool) -> None:
        """Load the state of a live group; if the run begins in all groups, only its weights."""
        content = load_plain(io.BytesIO(received.numpy().tobytes()), "of a live replica group")
        state, name, progress = self._state, self._state.run_name, self._state.resumption
        assert progress is not None, "the Trainer has set it"
        if begins:
            state.load_model_state(content["state"])
        else:
            progress.before_load(content)
            state.load_state_dict(content["state"], strict=True)
            progress.after_load(content)
            state.run_name = name

    def _send(self) -> torch.Tensor:
        """Return the run as a checkpoint would hold it."""
        content = collect(self._state)
        del content["rng"]  # each group has its own random numbers
        if self._in_batch:  # the loader's own state is one batch ahead; without it, the other loader is advanced
            content["resumption"]["loader"] = [{**each, "loader": None} for each in content["resumption"]["loader"]]
        file = io.BytesIO()
        torch.save(content, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    # ---- in a step ----

    def begin_batch(self) -> None:
        """Find out which groups are alive, and hand the state of the run to those that have returned."""
        self._in_batch = False
        if not self._has_quorum:
            self._begin_quorum()
        self._in_batch = True

    def _begin_quorum(self) -> None:
        """Begin a quorum.

        Raises:
            RuntimeError: The others have gone on without this group.
        """
        step = self._manager.current_step()
        self._manager.start_quorum()
        self._has_quorum = True
        if self._manager.current_step() != step:
            raise RuntimeError(
                f"The other replica groups have gone on without group {self._index}, which did not answer in time or "
                f"lost its connections in a step that the others finished. Start it again: it gets their state."
            )

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over the live groups; if one dies, the others repeat the exchange without it."""
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if not trainable:  # all layers are frozen, in every group
            return
        kinds: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in trainable:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        while True:
            present, averages = self._exchange(trainable, kinds.values())
            self._has_quorum = False
            if self._manager.should_commit():
                break
            # Close the connections, or a group that still waits for this one would not notice.
            self._replicas.abort()
            self._begin_quorum()
        # Reading the device costs nothing here: `should_commit` has waited for it.
        anywhere = dict(zip(trainable, present.tolist(), strict=True))
        for parameters, average in zip(kinds.values(), averages, strict=True):
            parts = torch.split(average, [parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if anywhere[parameter]:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad.copy_(part.view_as(parameter))

    def _exchange(
        self, trainable: Sequence[torch.nn.Parameter], kinds: Iterable[Sequence[torch.nn.Parameter]]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return which gradients exist in any group, and the averages, which are useless if an exchange has failed.

        The gradients stay as they are. One that is missing in this group counts as zero. What runs the exchange, and
        keeps its connections open, must not outlive this call.
        """
        from torch.distributed import ReduceOp

        exists = [parameter.grad is not None for parameter in trainable]
        present = torch.tensor(exists, dtype=torch.uint8).to(trainable[0].device)
        averages = [
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
            for parameters in kinds
        ]
        works = [self._manager.allreduce(present, reduce_op=ReduceOp.MAX), *map(self._manager.allreduce, averages)]
        for work in works:
            work.wait()
        return present, averages

    def sum_counts(
        self, samples: float, tokens: int, interrupted: bool = False, lap: float = 0.0
    ) -> tuple[float, int, bool, float]:
        """Count the samples and tokens of one step as those of this group times the number of live groups."""
        number = self._manager.num_participants()
        return samples * number, tokens * number, interrupted, lap

    # ---- between steps ----

    def close(self) -> None:
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._manager = None
