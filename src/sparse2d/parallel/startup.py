"""What must hold before the first step, checked on the ranks: every table whole in each group, copies bit-equal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from sparse2d.mesh import Mesh
from sparse2d.parallel.tables import Shard, local_shards
from sparse2d.plan import DATA_PARALLEL, Plan, Range, cover_fault

Place = tuple[str, Range, Range]


@dataclass(frozen=True)
class Holding:
    """What one rank holds: a digest of each shard, by table, rows and columns, and of each dense parameter, by name.

    ``shards`` is a list, so that a shard that is there twice is seen.
    """

    shards: list[tuple[Place, str]]
    dense: dict[str, str]


def check_start(model: nn.Module, plan: Plan, mesh: Mesh, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Compare what all T ranks hold with the plan, the tables' shapes and each other (a collective).

    Only places and digests travel, never weights.

    Raises:
        RuntimeError: on every rank alike, with the table and the ranks.
    """
    holdings: list[Holding | None] = [None] * mesh.world_size
    dist.all_gather_object(holdings, local_holding(model))
    for fault in start_faults([holding for holding in holdings if holding is not None], plan, mesh, shapes):
        raise RuntimeError(f"the ranks do not start as planned: {fault}")


def local_holding(model: nn.Module) -> Holding:
    """What this rank holds."""
    dense = {name: digest(value) for name, value in model.named_parameters() if ".embedding_bags." not in name}
    return Holding([(_place(shard), digest(shard.weight)) for shard in local_shards(model)], dense)


def _place(shard: Shard) -> Place:
    height, width = shard.weight.shape
    return shard.table, (shard.row, shard.row + height), (shard.column, shard.column + width)


def digest(tensor: Tensor) -> str:
    """A 128-bit digest of a tensor's bytes; 12 GB/s on one core, so that it costs less than filling them."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else ""


def start_faults(
    holdings: Sequence[Holding], plan: Plan, mesh: Mesh, shapes: Mapping[str, tuple[int, int]]
) -> Iterator[str]:
    """Everything that is wrong with what the T ranks hold, in words."""
    names = [table.name for table in plan.tables]
    for name in sorted(set(names) ^ set(shapes)):
        yield f"table {name} is " + ("planned, and the model has none" if name in names else "not planned")
    for name in sorted(name for name in set(names) if names.count(name) > 1):
        yield f"table {name} is planned {names.count(name)} times"
    for group, ranks in enumerate(mesh.groups):
        yield from _misplaced(holdings, plan, ranks)
        yield from _uncovered(holdings, plan, ranks, shapes, group)
    yield from _unequal([dict(holding.shards) for holding in holdings])
    yield from _unequal([holding.dense for holding in holdings])


def _misplaced(holdings: Sequence[Holding], plan: Plan, ranks: Sequence[int]) -> Iterator[str]:
    for member, rank in enumerate(ranks):
        planned = sorted((table.name, shard.rows, shard.columns) for table, shard in plan.shards_of(member))
        held = sorted(place for place, _ in holdings[rank].shards)
        for table, rows, columns in set(planned) ^ set(held):
            where = f"rows {rows[0]} to {rows[1]} of columns {columns[0]} to {columns[1]}"
            state = "lacks" if (table, rows, columns) in planned else "holds, unplanned,"
            yield f"rank {rank} {state} {where} of table {table}"
        if len(held) != len(set(held)):
            yield f"rank {rank} holds a shard of table {max(held, key=held.count)[0]} twice"


def _uncovered(
    holdings: Sequence[Holding], plan: Plan, ranks: Sequence[int], shapes: Mapping[str, tuple[int, int]], group: int
) -> Iterator[str]:
    replicated = {table.name for table in plan.tables if table.sharding == DATA_PARALLEL}
    for name, (rows, dim) in shapes.items():
        for holders in [[rank] for rank in ranks] if name in replicated else [list(ranks)]:
            places = [place for rank in holders for place, _ in holdings[rank].shards if place[0] == name]
            if fault := cover_fault(rows, dim, [(row_range, columns) for _, row_range, columns in places]):
                yield f"table {name} in group {group} (ranks {holders}): {fault}"


def _unequal(digests: Sequence[Mapping[Any, str]]) -> Iterator[str]:
    """Places, or names, under which different ranks hold different bits."""
    holders: dict[Place | str, dict[str, list[int]]] = {}
    for rank, mine in enumerate(digests):
        for name, value in mine.items():
            holders.setdefault(name, {}).setdefault(value, []).append(rank)
    for name, ranks in holders.items():
        if len(ranks) > 1:
            what = (
                f"parameter {name}" if isinstance(name, str) else f"table {name[0]}, rows {name[1]}, columns {name[2]},"
            )
            yield f"{what} differs between ranks " + " and ".join(map(str, ranks.values()))
