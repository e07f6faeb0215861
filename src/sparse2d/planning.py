"""Plans in the launcher's process, where no rank runs: ``plan_only=true``, and pinned plans before ranks start."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sparse2d.config import Device, TrainConfig
from sparse2d.errors import UserError
from sparse2d.mesh import Mesh, rank_from_env
from sparse2d.models.dlrm import build_dlrm
from sparse2d.optimizers.fused import table_sharder
from sparse2d.parallel.plan_summary import PlanSummary, plan_and_summarise
from sparse2d.plan import Plan, Range, write_plan

log = logging.getLogger(__name__)
# TorchRec's planner warns of what every run here does.
logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)


def plan_here(config: TrainConfig, num_embeddings: Sequence[int]) -> tuple[Plan, PlanSummary]:
    """The plan that the ranks of ``config`` would make, or that its plan file pins.

    Args:
        config: of the run; on the CPU, memory is a share of this machine's.
        num_embeddings: rows of the 26 tables.

    Raises:
        UserError: if nothing fits, or the pinned plan is not of this run.
    """
    launch, layout = config.launch, config.parallelism
    mesh = Mesh(launch.num_ranks, layout.num_groups, layout.replicas)
    rank = rank_from_env()
    local_world_size = layout.ranks_per_host or (rank.local_world_size if rank is not None else launch.num_ranks)
    device = _device(launch.device, local_world_size)
    return plan_and_summarise(
        # Seed and base rate decide initial weights, which a plan does not look at.
        build_dlrm(config.model, num_embeddings, base_rate=0.5, seed=0, device=torch.device("cpu")),
        table_sharder(config.optimizer, mesh.num_groups, device),
        layout,
        mesh=mesh,
        local_world_size=local_world_size,
        rank_batch_size=config.global_batch_size // launch.num_ranks,
        device=device,
    )


def _device(wanted: Device, local_world_size: int) -> torch.device:
    """What the ranks would compute on (see ``loop.choose_device``), without taking hold of it."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    if wanted is Device.cuda and not enough:
        raise UserError(f"launch.device=cuda needs a GPU for each of the {local_world_size} ranks of a host")
    return torch.device("cpu" if wanted is Device.cpu or not enough else "cuda")


def plan_only(config: TrainConfig, num_embeddings: Sequence[int]) -> None:
    """Print what each rank of a group would hold, and write the plan file."""
    plan, summary = plan_here(config, num_embeddings)
    default = Path(config.results_dir) / "plans" / f"{config.experiment}-{plan.digest[:16]}.json"
    path = default if config.plan_out is None else Path(config.plan_out)
    write_plan(plan, path)
    console = Console()
    console.print(_table_view(plan), _rank_view(plan, summary), sep="\n")
    console.print(
        f"imbalance (fullest over mean): bytes {summary.imbalance:.3f}, load {summary.load_imbalance:.3f}; "
        "load is modelled: TorchRec's estimate for the hardware that its planner assumes",
        highlight=False,
    )
    log.info("pin this plan with parallelism.plan_file=%s", path)


def _table_view(plan: Plan) -> Table:
    layout = plan.layout
    view = Table(
        title=f"{layout.parallelism}: {layout.num_groups} x {layout.group_size} ranks, {layout.replicas}, "
        f"{layout.ranks_per_host} ranks of a group on a host, {layout.device}"
    )
    for name in ("table", "rows", "dim", "sharding", "ranks of the group", "rows of a shard", "columns"):
        view.add_column(name, justify="left" if name in ("table", "sharding") else "right")
    for table in plan.tables:
        view.add_row(
            table.name,
            f"{table.rows:,}",
            str(table.dim),
            table.sharding,
            _runs(sorted({shard.rank for shard in table.shards})),
            _sizes([shard.rows for shard in table.shards]),
            _sizes([shard.columns for shard in table.shards]),
        )
    return view


def _rank_view(plan: Plan, summary: PlanSummary) -> Table:
    view = Table(title="each rank of a group")
    for name in ("rank", "shards", "rows", "weights and state (MiB)", "load (ms, modelled)"):
        view.add_column(name, justify="right")
    columns = (summary.shards_per_rank, summary.rows_per_rank, summary.bytes_per_rank, summary.load_ms_per_rank)
    for rank, (shards, rows, size, load) in enumerate(zip(*columns, strict=True)):
        view.add_row(str(rank), str(shards), f"{rows:,}", f"{size / 2**20:,.2f}", f"{load:.4f}")
    return view


def _runs(numbers: Sequence[int]) -> str:
    """Sorted numbers, runs of them as ``first-last``."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


def _sizes(ranges: Sequence[Range]) -> str:
    """The smallest and the largest size of ranges."""
    sizes = sorted({stop - start for start, stop in ranges})
    return f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,}-{sizes[-1]:,}"
