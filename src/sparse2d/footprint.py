"""What the tables take of this host's memory, told and checked before ranks start."""

import logging
from collections.abc import Sequence

import psutil

from sparse2d.config import Combine, Device, EngineKind, ParallelismKind, TrainConfig
from sparse2d.errors import UserError
from sparse2d.units import size

log = logging.getLogger(__name__)

VALUE_BYTES = 4
# Below, nobody needs to be told.
WORTH_TELLING_BYTES = 1e9


def table_bytes(config: TrainConfig, num_embeddings: Sequence[int], local_world_size: int) -> int:
    """Bytes of the weights and the optimizer state of all tables on one host, all its ranks together.

    Args:
        config: of the run, settled.
        num_embeddings: rows of each table.
        local_world_size: ranks on the host.
    """
    dim = config.model.embedding_dim
    one_copy = sum(num_embeddings) * (dim + config.optimizer.name.state_values(dim)) * VALUE_BYTES
    if config.engine is EngineKind.emulated:
        # Replicas that step on one gradient are always equal.
        return one_copy * (1 if config.sync.combine is Combine.gradient else config.parallelism.num_groups)
    if config.parallelism.kind is ParallelismKind.data_parallel:
        return one_copy * local_world_size
    return one_copy * config.parallelism.num_groups * local_world_size // config.launch.num_ranks


def check_memory(config: TrainConfig, num_embeddings: Sequence[int], local_world_size: int) -> None:
    """Tell what large tables take; on GPUs TorchRec's planner refuses those that are too large.

    Raises:
        UserError: if the tables leave this host no free memory.
    """
    # Heavy; an entry point that only prints help must not pay for it.
    import torch

    if config.launch.device is not Device.cpu and torch.cuda.is_available():
        return
    needed, free = table_bytes(config, num_embeddings, local_world_size), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"tables of {sum(num_embeddings)} rows and their optimizer state take {size(needed)} on this host, "
            f"{size(free)} of memory are free; lower model.embedding_dim, prepare the data with a smaller "
            "data.max_table_rows, or use fewer groups"
        )
    if needed > WORTH_TELLING_BYTES:
        rows = sum(num_embeddings)
        log.info("tables of %d rows take %s of this host's memory (%s free)", rows, size(needed), size(free))
