"""Our placement beside that of TorchRec's planner, and plan files of training runs."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from workloads import options, workload

from sparse2d.cost.model import cluster_of, predict
from sparse2d.cost.placement import place, shard_costs
from sparse2d.cost.planned import from_plan
from sparse2d.cost.volumes import volumes
from sparse2d.cost.workload import make_workload
from sparse2d.errors import UserError
from sparse2d.plan import SCHEMA, Layout, Plan, PlannedShard, PlannedTable, write_plan


@pytest.mark.parametrize("num_gpus", [4, 16])
def test_the_slowest_rank_costs_no_more_than_with_torchrec(num_gpus):
    random = np.random.default_rng(0)
    rows = random.integers(1000, 10**6, 60).tolist()
    dims = random.choice([64, 128, 256], 60).tolist()
    pooling = random.integers(1, 60, 60).tolist()
    config = options(workload(rows, dims, pooling), num_gpus)
    config.parallelism.sharding = config.parallelism.sharding[:1]
    tables = make_workload(config.workload)
    cluster = cluster_of(config, tables)
    cost = shard_costs(tables, cluster, np.arange(60), tables.rows, tables.dims, np.ones(60))

    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows[i], embedding_dim=dims[i], feature_names=[f"f{i}"])
        for i in range(60)
    ]
    constraints = {
        f"t{i}": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"], pooling_factors=[float(pooling[i])]
        )
        for i in range(60)
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=num_gpus, local_world_size=4, compute_device="cuda", hbm_cap=80 * 2**30),
        constraints=constraints,
        batch_size=100,
    )
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    chosen = planner.plan(module, [EmbeddingBagCollectionSharder()]).plan[""]
    theirs = np.bincount([chosen[f"t{i}"].ranks[0] for i in range(60)], cost, num_gpus).max()
    placement = place(tables, cluster, config.parallelism)
    ours = np.bincount(placement.rank, cost[placement.table], num_gpus).max()
    assert ours <= theirs * (1 + 1e-9)


def plan_of(config, placement) -> Plan:
    """Our own placement of whole tables, as a plan file has it."""
    tables = make_workload(config.workload)
    layout = Layout("full_mp", 4, 1, 4, "intra_host", 4, "cuda")
    planned = [
        PlannedTable(name, int(rows), int(dim), "table_wise", [PlannedShard(int(rank), (0, int(rows)), (0, int(dim)))])
        for name, rows, dim, rank in zip(
            tables.table_names, tables.rows, tables.dims, placement.rank[np.argsort(placement.table)], strict=True
        )
    ]
    return Plan(SCHEMA, layout, {}, planned)


def test_a_plan_file_gives_the_volumes_of_its_placement(tmp_path):
    config = options(workload([1000, 2000, 3000, 4000, 5000], [64] * 5, [1, 2, 3, 4, 5]), num_gpus=4)
    tables = make_workload(config.workload)
    cluster = cluster_of(config, tables)
    placement = place(tables, cluster, config.parallelism)
    path = tmp_path / "plan.json"
    plan = plan_of(config, placement)
    write_plan(plan, path)
    ours, theirs = (volumes(tables, p, cluster) for p in (placement, from_plan(tables, plan, cluster)))
    assert json.dumps(asdict(ours), default=np.ndarray.tolist) == json.dumps(asdict(theirs), default=np.ndarray.tolist)
    pinned = replace(config, parallelism=replace(config.parallelism, plan_file=str(path)))
    assert predict(pinned).step == predict(config).step

    with pytest.raises(UserError, match="the plan is for group_size=4, this layout has 8"):
        predict(replace(pinned, num_gpus=8))
    write_plan(replace(plan, tables=plan.tables[1:]), path)
    with pytest.raises(UserError, match=r"table table_0 is None in the plan, \(1000, 64\) in the workload"):
        predict(pinned)
