"""DLRM in plain TorchRec, the way its golden training example goes: DistributedModelParallel and a loop, no framework.

torchrun --nproc-per-node 2 plain_torchrec.py --data ... (see bench.py)
"""

import logging

import torch
import torch.distributed as dist
from common import FEATURES, Clock, arguments, batches, tables
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def main() -> None:
    """Train for some steps and write what a step took."""
    given = arguments(__doc__)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables(given), device=torch.device("meta")),
            dense_in_features=13,
            dense_arch_layer_sizes=given.dense_arch,
            over_arch_layer_sizes=given.over_arch,
            dense_device=device,
        )
    )
    sharders = [
        EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}
        )
    ]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device.type),
        batch_size=given.batch // world_size,
        constraints={table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables(given)},
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3, eps=1e-8),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])

    clock = Clock()
    clock.watch(model)
    model.train()
    lengths = torch.ones(len(FEATURES) * given.batch // world_size, dtype=torch.int32)
    for dense_features, ids, labels in batches(given, rank, world_size):
        batch = Batch(
            dense_features=dense_features,
            sparse_features=KeyedJaggedTensor(keys=FEATURES, values=ids.view(-1), lengths=lengths),
            labels=labels,
        )
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
    clock.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
