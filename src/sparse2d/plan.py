"""A sharding plan as data: what each rank of a group holds, its checks, its digest, and the file that pins it.

Imports no torch, so that a bad plan file is refused at once. How a plan is made: ``parallel/plans.py``.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparse2d.errors import UserError
from sparse2d.records import write_atomically

SCHEMA: Literal[1] = 1
DATA_PARALLEL = "data_parallel"
Range = tuple[int, int]


class _Strict:
    """What a file may hold: exactly the declared fields, with their types."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class PlannedShard(_Strict):
    """A rectangle of a table on one rank: half-open ranges of rows and columns; ``rank`` counts inside the group."""

    rank: int
    rows: Range
    columns: Range


@dataclass(frozen=True)
class PlannedTable(_Strict):
    """One table [rows, dim], how it is cut (``ShardingKind`` or data_parallel), and its shards in TorchRec's order."""

    name: str
    rows: int
    dim: int
    sharding: str
    shards: list[PlannedShard]


@dataclass(frozen=True)
class Layout(_Strict):
    """What a plan is made for: T = M x N ranks, where they are, and what they compute on.

    Attributes:
        parallelism: a ``ParallelismKind``.
        world_size: T.
        num_groups: M.
        group_size: N.
        replicas: a ``Replicas``.
        ranks_per_host: how many ranks of one group share a host.
        device: cpu or cuda.
    """

    parallelism: str
    world_size: int
    num_groups: int
    group_size: int
    replicas: str
    ranks_per_host: int
    device: str


@dataclass(frozen=True)
class Plan(_Strict):
    """The tables of one group; every group holds the same. ``versions`` say what it was made with."""

    schema: Literal[1]
    layout: Layout
    versions: dict[str, str | None]
    tables: list[PlannedTable]

    @property
    def digest(self) -> str:
        """The sha256 of all that decides what lies where: equal for files that differ in blanks or versions alone."""
        content = asdict(self)
        del content["versions"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def shards_of(self, rank: int) -> Iterator[tuple[PlannedTable, PlannedShard]]:
        """What one rank of the group holds."""
        return ((table, shard) for table in self.tables for shard in table.shards if shard.rank == rank)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON, a table on each line; the file is whole or absent.

    Raises:
        UserError: if the file cannot be written.
    """
    head = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in asdict(plan).items() if name != "tables"]
    tables = ",\n".join(f"  {json.dumps(asdict(table))}" for table in plan.tables)
    try:
        write_atomically(path, "\n".join(["{", *head, ' "tables": [', tables, " ]", "}", ""]))
    except OSError as error:
        raise UserError(f"{path}: the plan cannot be written: {error.strerror or error}") from error


def read_plan(path: Path) -> Plan:
    """Read a plan file; its content is checked by ``refuse_stale``.

    Raises:
        UserError: if it is missing, damaged, or not of this schema.
    """
    try:
        return TypeAdapter(Plan).validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"parallelism.plan_file={path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"parallelism.plan_file={path}: {place}: {first['msg']}; {REMEDY}") from error


REMEDY = "make it anew with plan_only=true"


def refuse_stale(plan: Plan, path: Path, layout: Layout, tables: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a plan that was made for another run, or that leaves a part of a table out or places it twice.

    Args:
        plan: as read.
        path: of its file.
        layout: of this run.
        tables: (rows, dim) of this run's tables, by name.

    Raises:
        UserError: one line with the first difference.
    """
    for fault in _faults(plan, layout, tables):
        raise UserError(f"parallelism.plan_file={path}: {fault}; {REMEDY}")


def _faults(plan: Plan, layout: Layout, tables: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    for name in (field.name for field in fields(Layout)):
        theirs, ours = getattr(plan.layout, name), getattr(layout, name)
        if theirs != ours:
            yield f"made for {name}={theirs}, this run has {name}={ours}"
    names = [table.name for table in plan.tables]
    for name in names:
        if name not in tables:
            yield f"table {name} is none of this run's"
        if names.count(name) > 1:
            yield f"table {name} is planned {names.count(name)} times"
    for name in tables:
        if name not in names:
            yield f"table {name} is missing"
    for table in plan.tables:
        if (table.rows, table.dim) != tables[table.name]:
            rows, dim = tables[table.name]
            yield f"table {table.name} has {table.rows} x {table.dim} values there, {rows} x {dim} in this run"
        for shard in table.shards:
            if not 0 <= shard.rank < layout.group_size:
                yield f"table {table.name}: rank {shard.rank} is none of a group of {layout.group_size}"
        copies = range(layout.group_size) if table.sharding == DATA_PARALLEL else [None]
        for rank in copies:
            held = [(shard.rows, shard.columns) for shard in table.shards if rank in (None, shard.rank)]
            if fault := cover_fault(table.rows, table.dim, held):
                yield f"table {table.name}: {fault}" + ("" if rank is None else f" {rank}")


def cover_fault(rows: int, dim: int, rectangles: Sequence[tuple[Range, Range]]) -> str | None:
    """What keeps rectangles from covering a table [rows, dim] exactly once, in words; None if they do.

    Args:
        rows: of the table.
        dim: columns of the table.
        rectangles: half-open ranges of rows and of columns.
    """
    for row_range, column_range in rectangles:
        for (start, stop), size, axis in ((row_range, rows, "rows"), (column_range, dim, "columns")):
            if start >= stop:
                return f"{axis} {start} to {stop} are an empty shard"
            if start < 0 or stop > size:
                return f"{axis} {start} to {stop} are not inside 0 to {size}"
    # Between neighbouring edges every value has the same number of holders.
    row_edges = sorted({0, rows} | {edge for row_range, _ in rectangles for edge in row_range})
    column_edges = sorted({0, dim} | {edge for _, column_range in rectangles for edge in column_range})
    holders = np.zeros((len(row_edges) - 1, len(column_edges) - 1), np.int64)
    for (top, bottom), (left, right) in rectangles:
        row, column = np.searchsorted(row_edges, [top, bottom]), np.searchsorted(column_edges, [left, right])
        holders[row[0] : row[1], column[0] : column[1]] += 1
    for row, column in np.argwhere(holders != 1)[:1]:
        count = holders[row, column]
        where = f"rows {row_edges[row]} to {row_edges[row + 1]} of columns {column_edges[column]} to "
        return f"{where}{column_edges[column + 1]} are on " + (f"{count} shards" if count else "no rank")
    return None
