"""A strategy for replica groups that may die and return while the run goes on: torchft.

A replica group is one process with the whole model, or several among which it is sharded. The groups find each other
through a Lighthouse, a small server of torchft. Between two batches they ask it for a quorum, the groups that are
alive, and after the backward pass these average their gradients: each rank with the ranks of the same number in other
groups. If a group dies in between, the others repeat the exchange without it, with the gradients that they still have,
so that no batch is lost and none counts twice. A group that returns gets the state of the run from a live one, as if it
had loaded a checkpoint of this moment.
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

from composer.checkpoint.safe_load import load_plain
from composer.checkpoint.sharded_tensors import Path, is_sharded, map_nested, parameter_of
from composer.core import Algorithm, State, TimeUnit, effects
from composer.devices import Device
from composer.trainer import Strategy
from composer.trainer.sharded import ShardedParallel
from composer.utils import dist, needs_closure, plain_int, reproducibility
from composer.utils.parallelism import ParallelismConfig

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
    """Return a sampler that gives each replica group, and each process in it, a shard of a dataset.

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
    number, index = _shard_of(groups, group)
    return dist.get_sampler(dataset, drop_last=drop_last, shuffle=shuffle, num_replicas=number, rank=index, seed=seed)


def make_strategy(config: Any) -> Strategy:
    """Return the strategy of `Trainer(parallelism_config={"torchft": config})`.

    Args:
        config: The configuration of `TorchFT`, or with `fsdp` that of `ShardedTorchFT`.

    Raises:
        TypeError: It is not a dict.
        ValueError: An entry is unknown, missing or wrong.
    """
    shards = isinstance(config, Mapping) and config.get("fsdp") is not None
    return ShardedTorchFT(config) if shards else TorchFT(config)


def _shard_of(groups: int, group: int) -> tuple[int, int]:
    """Return the number of shards of the data, and the one of this process."""
    size = dist.get_world_size()
    return groups * size, group * size + dist.get_global_rank()


def _read(config: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the number of groups, the index of this one and the address of the Lighthouse.

    Raises:
        TypeError: `config` is not a dict.
        ValueError: An entry is unknown, missing or wrong.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"The configuration of torchft must be a dict, got {config!r}.")
    unknown = sorted(config.keys() - _VARIABLES.keys() - {"fsdp"})
    if unknown:
        raise ValueError(f"The configuration of torchft has the entries {[*_VARIABLES, 'fsdp']}, got {unknown}.")
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


class _ReplicaGroups(Strategy):
    """The exchange with other replica groups, for a class that also derives from the strategy within a group.

    Args:
        config: See `TorchFT`.
    """

    averages_in_backward = False  # over groups

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
        super().connect(device, timeout)
        self._timeout, self._backend = timeout, device.dist_backend

    def refusal(self, algorithm: Algorithm) -> str | None:
        return next((reason for effect, reason in _REFUSED.items() if effect in algorithm.placement.provides), None)

    def check_loader(self, dataloader: Any, argument: str) -> None:
        """Check that a training loader has the part of the data that belongs to this process.

        Raises:
            ValueError: Its sampler divides the data differently, or it has none.
        """
        super().check_loader(dataloader, argument)
        sampler = getattr(dataloader, "sampler", None)
        actual = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        expected = _shard_of(self._groups, self._index)
        if argument == "train_dataloader" and actual != expected:
            raise ValueError(
                f"`{argument}` must have a sampler with `num_replicas={expected[0]}` and `rank={expected[1]}`, got "
                f"{actual[0]} and {actual[1]}: each replica group trains on its own part of the data. Use "
                f"`composer.torchft.get_sampler(dataset)`."
            )

    def shard(self, state: State) -> None:
        """Check what the groups could not do together.

        Raises:
            ValueError: The run ends by time or tokens, searches for a microbatch size, or has several exchanges of
                gradients in a step.
        """
        super().shard(state)
        self._state = state
        if hasattr(state.model, "begin_turn") or any(map(needs_closure, state.optimizers)):
            kinds = ", ".join(type(each).__name__ for each in state.optimizers)
            raise ValueError(
                f"`optimizers` must step together after one backward pass with torchft, without closures or turns, got "
                f"{kinds}: a group may join whenever gradients are averaged."
            )
        self._check_duration()
        if state.auto_microbatching:
            raise ValueError(
                "`device_train_microbatch_size` must not be 'auto' with torchft: the other groups would wait for the "
                "search. Give a number."
            )

    def _check_duration(self) -> None:
        """Check that all groups end at the same step.

        Raises:
            ValueError: The run ends by time or tokens.
        """
        limit = self._checked = self._state.max_duration
        if limit is not None and limit.unit in (TimeUnit.TOKEN, TimeUnit.SECOND):
            raise ValueError(
                f"`max_duration` must be in epochs, batches or samples with torchft, got {str(limit)!r}: the groups "
                f"count tokens and seconds differently, and must end at the same step."
            )

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        """Join the other groups, and load the state of a live one; return the model.

        Raises:
            TimeoutError: The run would begin, and not all groups have come within `dist_timeout`.
        """
        self._model = super().wrap(model, algorithms)
        self._connect_groups()
        self._join()
        # Groups draw different random numbers, as ranks do.
        seed = self._state.seed + self._index * self.world_size
        reproducibility.seed_all(seed % (reproducibility.MAX_SEED + 1))
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

        rank, port = dist.get_global_rank(), 0
        if rank == 0:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        host, port = self.broadcast((host, port))
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
            init_sync=False,  # it would take the weights of each rank from another group
            rank=rank,
            world_size=self.world_size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=self._lighthouse,
            replica_id=f"group{self._index}",
        )

    def _join(self) -> None:
        """Wait for the quorum in which this group begins, and load the state that it gets there.

        The steps that torchft counts are one more than the batches of the run: at its step 0 the run has not begun.
        """
        manager, batches = self._manager, self._state.timestamp.batches
        deadline = time.monotonic() + self._timeout
        while True:
            self._received.clear()
            manager.load_state_dict({"step": batches + 1 if batches else 0, "batches_committed": 0})
            manager.start_quorum()
            here, begins = manager.num_participants(), manager.current_step() == 0
            if begins and here == self._groups:
                self._share_weights()
            # A rank whose connections failed begins anew together with the other ranks of its group.
            failed, _ = self.any_finished(manager.errored() is not None)
            if not failed and (here == self._groups or not begins):
                break
            if time.monotonic() > deadline:
                failure = manager.errored()
                reason = "and exchange their weights" if here == self._groups else f"but only {here} have come"
                raise TimeoutError(
                    f"The run begins when all {self._groups} replica groups are there, {reason} within "
                    f"{self._timeout:g} s. Start the others, or increase `dist_timeout`. If they have finished, the "
                    f"run is complete."
                ) from (None if failure is None else failure.original_exception)
            time.sleep(_POLL_SECONDS)
        self._has_quorum = True
        if begins:
            manager.load_state_dict({"step": 1, "batches_committed": 0})
        if self._received:
            self._load(self._received.pop())

    @torch.no_grad()
    def _share_weights(self) -> None:
        """Give the weights of the first group to all others, unless the exchange fails."""
        from torch.distributed import ReduceOp

        tensors = [_local(each) for each in (*self._model.parameters(), *self._model.buffers())]
        tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        is_first = self._manager.participating_rank() == 0
        sums = [tensor.clone() if is_first else torch.zeros_like(tensor) for tensor in tensors]
        for work in [self._manager.allreduce(each, reduce_op=ReduceOp.SUM) for each in sums]:
            work.wait()
        if self._manager.errored() is None:
            torch._foreach_copy_(tensors, sums)

    def _load(self, received: torch.Tensor) -> None:
        """Load the state of a live group."""
        from torch.distributed.tensor import DTensor

        content = load_plain(io.BytesIO(received.numpy().tobytes()), "of a live replica group")
        state, name, progress = self._state, self._state.run_name, self._state.resumption
        assert progress is not None, "the Trainer has set it"
        parameters, sharded = dict(self._model.named_parameters(remove_duplicate=False)), {*content.pop("sharded")}

        def shard(path: Path, leaf: Any) -> Any:
            like: Any = parameter_of(path, parameters) if path in sharded else None
            if like is None:
                return leaf
            shape = {"shape": like.shape, "stride": like.stride()}
            return DTensor.from_local(leaf, like.device_mesh, like.placements, run_check=False, **shape)

        content["state"] = map_nested(content["state"], shard)
        progress.before_load(content)
        state.load_state_dict(content["state"], strict=True)
        progress.after_load(content)
        state.run_name = name

    def _send(self) -> torch.Tensor:
        """Return the run as this rank would save it, with its shards alone.

        Not a collective operation: torchft chooses for each rank from which group it gets its state.
        """
        state, sharded = self._state, list[Path]()
        progress: Any = state.resumption

        def local(path: Path, leaf: Any) -> Any:
            if is_sharded(leaf):
                sharded.append(path)
                return _local(leaf.detach())
            return leaf

        content = {
            "state": map_nested(state.state_dict(), local),
            "resumption": progress.state_dict(gather=False),
            "sharded": sharded,
        }
        if self._in_batch:  # the loader's own state is one batch ahead; without it, the other loader is advanced
            content["resumption"]["loader"] = [{**each, "loader": None} for each in content["resumption"]["loader"]]
        file = io.BytesIO()
        torch.save(content, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    # ---- in a step ----

    def begin_batch(self) -> None:
        """Find out which groups are alive, and hand the state of the run to those that have returned."""
        self._in_batch = False
        if self._state.max_duration is not self._checked:  # `fit(duration=...)`
            self._check_duration()
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
            parts = torch.split(average, [_local(parameter).numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if anywhere[parameter]:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    gradient = _local(parameter.grad)
                    gradient.copy_(part.view_as(gradient))

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
            torch.cat([_local(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
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
        samples, tokens, interrupted, lap = super().sum_counts(samples, tokens, interrupted, lap)
        number = self._manager.num_participants()
        return samples * number, tokens * number, interrupted, lap

    # ---- between steps ----

    def close(self) -> None:
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._manager = None
        super().close()


class TorchFT(_ReplicaGroups):
    """Average gradients over the replica groups that are alive, by torchft. A group is one process.

    `Trainer(parallelism_config={"torchft": {}})`. Source: https://github.com/pytorch/torchft.

    Args:
        config: `groups`, the number of groups that the data is divided among; `group`, the index of this one, from 0;
            `lighthouse`, the address of the Lighthouse, such as "http://host:29510". What is left out is read from the
            environment variables NUM_REPLICA_GROUPS, REPLICA_GROUP_ID and TORCHFT_LIGHTHOUSE.

    Raises:
        TypeError: `config` is not a dict.
        ValueError: An entry is unknown, missing or wrong.
    """

    def connect(self, device: Device, timeout: float) -> None:
        """Prepare the exchange with the other groups.

        Raises:
            ValueError: This process was started with others.
        """
        if dist.get_world_size() > 1:
            raise ValueError(
                f"{dist.get_world_size()} processes were started together, which are one replica group for torchft. "
                f"Shard the model in it, `{{'torchft': {{'fsdp': {{}}}}}}`, or start each by itself, with its number "
                f"in the environment variable REPLICA_GROUP_ID."
            )
        super().connect(device, timeout)


class ShardedTorchFT(_ReplicaGroups, ShardedParallel):
    """Shard the model in each replica group by FSDP2, and average gradients over the groups that are alive.

    `Trainer(parallelism_config={"torchft": {"fsdp": {}}})`, in processes that `composer` or `torchrun` has started. All
    groups must have the same number of them. If one dies, its whole group ends.

    Args:
        config: `fsdp`, how the model is sharded, see `composer.utils.FSDP2Config`; and what `TorchFT` takes.

    Raises:
        TypeError: `config` is not a dict.
        ValueError: An entry is unknown, missing or wrong.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        sharding = ParallelismConfig.of({"fsdp": config["fsdp"]})
        assert sharding is not None, "it has an entry"
        ShardedParallel.__init__(self, sharding)


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part
