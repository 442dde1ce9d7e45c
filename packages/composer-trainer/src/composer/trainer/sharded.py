"""Ranks that each hold a shard of the model: torch's `fully_shard`, and `parallelize_module` below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed
from torch.utils.data.distributed import DistributedSampler

from composer.core import Precision, State
from composer.devices import Device
from composer.distributed._materialize import place_model
from composer.distributed.ddp import DDPSyncStrategy
from composer.distributed.fsdp2 import check_can_shard, device_of, is_unit, shard_model
from composer.distributed.mesh import REPLICATE, SHARD, TENSOR, make_mesh
from composer.distributed.tensor_parallel import divide_layers
from composer.trainer.strategy import RankStrategy, check_same_structure, flatten_metrics
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config, ParallelismConfig, TPConfig


class ShardedParallel(RankStrategy):
    """The ranks of the default process group, among which the model is sharded.

    Args:
        config: How to shard.
        sync: When gradients are synchronized; None: with every microbatch, so that full gradients take no memory.

    Raises:
        ValueError: `sync` is not supported.
    """

    collective_forward = True
    averages_in_backward = True

    def __init__(self, config: ParallelismConfig, sync: DDPSyncStrategy | None = None) -> None:
        if sync is DDPSyncStrategy.FORCED_SYNC:
            raise ValueError(
                "`ddp_sync_strategy='forced_sync'` is not supported with `parallelism_config`: gradients exist "
                "in shards only. Use 'single_auto_sync' or 'multi_auto_sync'."
            )
        assert isinstance(config.fsdp, FSDP2Config), "`ParallelismConfig.of` converts other types"
        self._config, self._fsdp, self._sync = config, config.fsdp, sync
        self._tp = config.tp if isinstance(config.tp, TPConfig) else None
        self._degree = 1 if self._tp is None else self._tp.tensor_parallel_degree
        self._data_group: Any = None  # the ranks that train on different data: one of each tensor-parallel group
        self._units: list[Any] = []
        self._precision: Precision | None = None  # the precision that the model was sharded for

    # ---- at construction ----

    def connect(self, device: Device, timeout: float) -> None:
        """Prepare the exchange with other ranks, and make the meshes.

        Raises:
            ValueError: The degrees do not match the number of ranks, or offloading is not supported.
            RuntimeError: This version of torch cannot shard on the CPU.
        """
        check_can_shard(self._fsdp, device.name)
        self._mesh = self._data_mesh = self._fsdp.device_mesh
        if self._mesh is None:
            self._mesh = make_mesh(self._fsdp, self._degree, device.torch_type)
            dims = self._mesh.mesh_dim_names or ()
            self._data_mesh = self._mesh[tuple(name for name in (REPLICATE, SHARD) if name in dims)]
        super().connect(device, timeout)
        self._data_ranks: list[int] = self._data_mesh.mesh.flatten().tolist()  # the ranks that split the data
        size = len(self._data_ranks)
        if size * self._degree != self.world_size:
            raise ValueError(
                f"`device_mesh` must hold all {self.world_size} ranks, but {size} ranks that split the data x "
                f"{self._degree} tensor-parallel ranks is {size * self._degree}."
            )
        if self._degree > 1:
            groups = {tuple(ranks) for ranks in dist.all_gather_object(self._data_ranks, self.host_group)}
            ranks_of_groups = [[*ranks] for ranks in sorted(groups)]
            self._data_group, _ = torch.distributed.new_subgroups_by_enumeration(ranks_of_groups)

    @property
    def _data_rank(self) -> int:
        """The index of the data shard of this rank; tensor-parallel ranks have the same one."""
        return self._data_ranks.index(self.rank)

    def place(self, model: torch.nn.Module, device: Device) -> torch.nn.Module:
        """Leave the model where it is, as it may not fit the device unsharded; check that ranks build the same one."""
        with self.report_lost_ranks():
            check_same_structure(model, self.rank, self.host_group)
        return model

    def describe_sharding(self, state: State) -> None:
        """Set the attributes of `state` that describe the sharding and this rank's part of the data."""
        ParallelismConfig.describe_in(state, self._config)
        state.data_rank, state.device_mesh = self._data_rank, self._mesh

    def shard(self, state: State) -> None:
        model, seed = state.model, state.rank_zero_seed
        with self.report_lost_ranks():
            if self._tp is not None:
                place_model(model, device_of(self._mesh), seed, self.host_group)
                mesh = self._mesh[TENSOR] if self._tp.device_mesh is None else self._tp.device_mesh
                divide_layers(model, state.optimizers, self._tp.layer_plan or {}, mesh)
            precision, ready = state.precision, self._tp is not None
            shard_model(
                model, state.optimizers, self._fsdp, self._data_mesh, precision, seed, self.host_group, ready=ready
            )
        self._units = [module for module in model.modules() if is_unit(module)]
        self._precision = state.precision

    def check_loader(self, dataloader: Any, argument: str) -> None:
        """Check that tensor-parallel ranks get the same samples.

        Raises:
            ValueError: The loader's distributed sampler splits the data differently.
        """
        if self._degree == 1:
            return
        for sampler in (getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
            if not isinstance(sampler, DistributedSampler):
                continue
            actual, expected = (sampler.num_replicas, sampler.rank), (len(self._data_ranks), self._data_rank)
            if actual != expected:
                raise ValueError(
                    f"The sampler of `{argument}` must have `num_replicas={expected[0]}` and, on rank {self.rank}, "
                    f"`rank={expected[1]}`, got {actual[0]} and {actual[1]}: tensor-parallel ranks train on the same "
                    f"samples. Give `DistributedSampler` the number of ranks divided by `tensor_parallel_degree`, and "
                    f"the rank divided by it."
                )

    def check_precision(self, precision: Precision) -> None:
        """Check that the model gathers its weights in the dtype of `precision`.

        Raises:
            ValueError: The model was sharded for another precision.
        """
        if self._precision is not None and precision is not self._precision and self._fsdp.mixed_precision != "FULL":
            raise ValueError(
                f"`precision` must stay {self._precision.value!r} once the model is sharded for it, got "
                f"{precision.value!r}. Give it to the `Trainer`, or use `{{'fsdp': {{'mixed_precision': 'FULL'}}}}`."
            )

    def prepare_metrics(self, metrics: Iterable[Any]) -> None:
        """Let metrics gather their states from the ranks with different data, without waiting for the device."""
        metrics = list(metrics)
        super().prepare_metrics(metrics)
        if self._data_group is None:
            return
        for part in flatten_metrics(metrics):
            if getattr(part, "process_group", self) is None:
                part.process_group = self._data_group

    # ---- in a step ----

    def backward_context(self, last_microbatch: bool, sync: bool) -> AbstractContextManager[None] | None:
        """Return a context that follows the synchronization strategy; see `Strategy`.

        `sync=False` is ignored: gradients exist in shards only.
        """
        if last_microbatch or self._sync is not DDPSyncStrategy.SINGLE_AUTO_SYNC:
            return None
        return self._without_sync()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(sync, recurse=False)

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def sum_counts(
        self, samples: float, tokens: int, interrupted: bool = False, lap: float = 0.0
    ) -> tuple[float, int, bool, float]:
        """Sum the samples and tokens of one step, counting tensor-parallel ranks only once; see `Strategy`."""
        samples, tokens, interrupted, lap = super().sum_counts(samples, tokens, interrupted, lap)
        if self._degree == 1:
            return samples, tokens, interrupted, lap
        share = samples / self._degree
        return int(share) if share.is_integer() else share, tokens // self._degree, interrupted, lap
