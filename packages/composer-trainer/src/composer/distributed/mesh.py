"""The device mesh: which ranks hold replicas of the model, its shards, and parts of its layers."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from composer.utils.string_enum import StringEnum


class ParallelismType(StringEnum):
    """The names of the dimensions of a device mesh."""

    DATA_PARALLEL_SHARD = "data_parallel_shard"
    DATA_PARALLEL_REPLICATE = "data_parallel_replicate"
    TENSOR_PARALLEL = "tensor_parallel"


REPLICATE = ParallelismType.DATA_PARALLEL_REPLICATE.value
"""The mesh dimension of data parallelism with a copy of the parameters on each rank."""
SHARD = ParallelismType.DATA_PARALLEL_SHARD.value
"""The mesh dimension of data parallelism with parameters sharded over the ranks."""
TENSOR = ParallelismType.TENSOR_PARALLEL.value
"""The mesh dimension of tensor parallelism."""


def mesh_shape(fsdp: FSDP2Config, tensor_degree: int, world_size: int) -> dict[str, int]:
    """Return the sizes of a mesh's dimensions by their names in `ParallelismType`, without dimensions of size 1.

    Args:
        fsdp: How the model is sharded.
        tensor_degree: The number of tensor-parallel ranks.
        world_size: The number of ranks.

    Raises:
        ValueError: The product of the sizes is not the number of ranks.
    """
    others = world_size // tensor_degree
    shard, copies = fsdp.data_parallel_shard_degree, fsdp.data_parallel_replicate_degree or 1
    if shard == -1:
        shard = max(1, others // copies)
    elif copies == -1:
        copies = max(1, others // shard)
    if copies * shard * tensor_degree != world_size:
        raise ValueError(
            f"The degrees of `parallelism_config` must multiply to the number of ranks, {world_size}, but {copies} "
            f"copies x {shard} shards x {tensor_degree} parts of layers is {copies * shard * tensor_degree}. Leave "
            f"`data_parallel_shard_degree` at -1, which uses all remaining ranks."
        )
    shape = {REPLICATE: copies, SHARD: shard, TENSOR: tensor_degree}
    return {name: size for name, size in shape.items() if size > 1 or name == SHARD}


def make_mesh(fsdp: FSDP2Config, tensor_degree: int, device_type: str) -> DeviceMesh:
    """Create the mesh of all ranks. A collective operation.

    Raises:
        ValueError: The degrees do not match the number of ranks.
    """
    shape = mesh_shape(fsdp, tensor_degree, dist.get_world_size())
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
