"""What is in a checkpoint: logical tensors under names that no layout changes, from and to an engine.

========================================  =================  =====================================================
``tables/T/weight``                       [rows, dim]
``tables/T/moment_J``                     [rows, dim]        where the optimizer keeps one for each element
``tables/T/moment_J/columns_A_B``         [rows]             row-wise, of a shard of columns [A, B)
``tables/T/iteration``                    []                 optimizer steps, for Adam's bias correction
``dense/P/weight``, ``dense/P/STATE``     as they are        a parameter and torch's optimizer state of it
``group_G/tables/...``                                       the above, where the M replicas differ
``rank_R/...``                                               of one rank alone
========================================  =================  =====================================================

A row-wise moment sums mean squares over its shard's columns, so the moment of columns [A, B) is the mean of what was
saved of them, weighted by width. That is exact where shards are joined; where one is split, the parts get its moment.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from sparse2d.checkpoint.rectangles import Rectangle, State
from sparse2d.engine import Engine
from sparse2d.errors import UserError
from sparse2d.optimizers.rows import ReplicatedRowAdam
from sparse2d.parallel.tables import Shard, local_shards, lookup_kernels

# Moments of torch's optimizers, in the order in which FBGEMM's kernels keep the same.
_TORCH_MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    RowWiseAdagrad: ("sum",),
    ReplicatedRowAdam: ("exp_avg", "exp_avg_sq"),
}
# Replicas may differ in any of these between averagings.
WEIGHT, MOMENT = "weight", "moment"


def engine_state(engine: Engine, group: int, different: frozenset[str]) -> State:
    """This rank's part of everything that all layouts share; tensors are views of the live ones.

    Args:
        engine: what is saved.
        group: of this rank.
        different: which of ``WEIGHT`` and ``MOMENT`` differ between the replicas; saved for each group.
    """
    state: State = {}
    for part in _table_parts(engine):
        prefix = f"group_{group}/" if part.kind in different else ""
        state.setdefault(prefix + part.name, []).append(part.rectangle)
    for name, tensor in table_iterations(engine).items():
        state[f"tables/{name}/iteration"] = [Rectangle.whole(tensor)]
    for name, param, param_state in _torch_states(engine, "dense"):
        state[f"dense/{name}/weight"] = [Rectangle.whole(param.detach())]
        for key, value in param_state.items():
            state[f"dense/{name}/{key}"] = [Rectangle.whole(value)]
    return state


@dataclass(frozen=True)
class _Part:
    """A tensor of a table's shard: its name among all, and ``kind`` WEIGHT or MOMENT."""

    table: str
    name: str
    kind: str
    rectangle: Rectangle
    columns: tuple[int, int]


def _table_parts(engine: Engine) -> Iterator[_Part]:
    """Weights and moments of this rank's shards."""
    replicated = _replicated_moments(engine)
    for shard in local_shards(engine.model):
        rows, dim = engine.table_shapes[shard.table]
        if shard.weight.numel() == 0:
            continue
        columns = (shard.column, shard.column + shard.weight.shape[1])
        rectangle = Rectangle(shard.weight, (shard.row, shard.column), (rows, dim))
        yield _Part(shard.table, f"tables/{shard.table}/weight", WEIGHT, rectangle, columns)
        for index, moment in enumerate(shard.moments or replicated.get(shard.table, ())):
            name = f"tables/{shard.table}/moment_{index}"
            if moment.numel() == len(shard.weight) != shard.weight.numel():
                name += f"/columns_{columns[0]}_{columns[1]}"
                rectangle = Rectangle(moment.view(-1), (shard.row,), (rows,))
            else:
                rectangle = Rectangle(moment.view(shard.weight.shape), (shard.row, shard.column), (rows, dim))
            yield _Part(shard.table, name, MOMENT, rectangle, columns)


def _torch_states(engine: Engine, part: str) -> Iterator[tuple[str, nn.Parameter, dict[str, Tensor]]]:
    """Name without wrappers, parameter and (live) optimizer state, of one part of the combined optimizer."""
    for key, optimizer in engine.optimizer.optimizers:
        if key == part:
            for name, param in optimizer.params.items():
                yield re.sub(r"\b(module|_dmp_wrapped_module)\.", "", name), param, optimizer.state[param]


def _replicated_moments(engine: Engine) -> dict[str, tuple[Tensor, ...]]:
    """Moments of data-parallel tables, which a torch optimizer keeps; zeros where it has not made them yet."""
    moments = {}
    for key, wrapper in engine.optimizer.optimizers:
        if key != "replicated_tables":
            continue
        names = _TORCH_MOMENTS[type(wrapper._optimizer)]
        for name, param, state in _torch_states(engine, key):
            if names:
                state.setdefault("step", torch.zeros(1, dtype=torch.int64))
            for moment in names:
                state.setdefault(moment, torch.zeros_like(param))
            moments[_table_of(name)] = tuple(state[moment] for moment in names)
    return moments


def _table_of(parameter: str) -> str:
    return parameter.removesuffix(".weight").rsplit(".", 1)[-1]


def _fused_kernels(engine: Engine) -> Iterator[tuple[list[str], nn.Module]]:
    for kernel in lookup_kernels(engine.model):
        if isinstance(kernel, BatchedFusedEmbeddingBag):
            yield [table.name for table in kernel._config.embedding_tables], kernel.emb_module


def table_iterations(engine: Engine) -> dict[str, Tensor]:
    """Optimizer steps so far of every table on this rank, int64 []."""
    counts: dict[str, Tensor] = {}
    for tables, kernel in _fused_kernels(engine):
        counts |= dict.fromkeys(tables, kernel.iter.detach().cpu().view(()).clone())
    for name, _, state in _torch_states(engine, "replicated_tables"):
        if "step" in state:
            counts[_table_of(name)] = state["step"].detach().cpu().long().view(()).clone()
    return counts


def set_table_iterations(engine: Engine, counts: Mapping[str, Tensor]) -> None:
    """Set what ``table_iterations`` gave."""
    for tables, kernel in _fused_kernels(engine):
        for table in tables:
            if table in counts:
                kernel.iter.fill_(counts[table].item())
                # The kernel's own copy, which it computes with.
                kernel.iter_cpu.fill_(counts[table].item())
    for name, _, state in _torch_states(engine, "replicated_tables"):
        if "step" in state and _table_of(name) in counts:
            state["step"].fill_(counts[_table_of(name)].item())


@dataclass(frozen=True)
class _Blend:
    """A target that is the weighted mean of several saved tensors."""

    target: Tensor
    parts: list[tuple[float, Tensor]]

    @torch.no_grad()
    def apply(self) -> None:
        # In double precision, so that the mean of equal values is that value.
        self.target.copy_(torch.stack([weight * part.double() for weight, part in self.parts]).sum(dim=0))


class EngineLoad:
    """Fills an engine from a checkpoint of any layout: ``state`` is to be read, then ``finish`` called.

    Args:
        engine: what is filled.
        metadata: the checkpoint's index.
        group: whose copy to take where groups differ; None takes the mean over the groups.

    Raises:
        UserError: if the checkpoint lacks something that the engine has.
    """

    def __init__(self, engine: Engine, metadata: Metadata, group: int | None) -> None:
        self._engine = engine
        self._saved = metadata.state_dict_metadata
        self._groups = sorted({int(match[1]) for name in self._saved if (match := re.match(r"group_(\d+)/", name))})
        self._group = group
        self._blends: list[_Blend] = []
        self._iterations: dict[str, Tensor] = {}
        self._dense: list[tuple[dict[str, Tensor], str, Tensor]] = []
        self.state: State = {}
        for part in _table_parts(engine):
            self._add_table_part(part)
        self._add_iterations()
        self._add_dense()

    def _add(self, name: str, rectangle: Rectangle) -> None:
        if name not in self._saved:
            raise UserError(f"the checkpoint has no {name}: it is of another model or optimizer")
        self.state.setdefault(name, []).append(rectangle)

    def _add_table_part(self, part: _Part) -> None:
        copies = [(1.0, "")] if self._is_common(part) else self._copies()
        sources = [
            (share * width, prefix + name)
            for share, prefix in copies
            for width, name in (self._columns(part, prefix) if "/columns_" in part.name else [(1.0, part.name)])
        ]
        parts = []
        for weight, name in sources:
            # Two shards on this rank may need the same part of the same tensor: it is read once.
            known = next((r for r in self.state.get(name, []) if r.offset == part.rectangle.offset), None)
            if known is None and len(sources) == 1:
                self._add(name, part.rectangle)
                return
            if known is None:
                known = dataclasses.replace(part.rectangle, tensor=torch.empty_like(part.rectangle.tensor))
                self._add(name, known)
            parts.append((weight, known.tensor))
        self._blends.append(_Blend(part.rectangle.tensor, parts))

    def _is_common(self, part: _Part) -> bool:
        return not self._groups or any(name.startswith(f"tables/{part.table}/{part.kind}") for name in self._saved)

    def _copies(self) -> list[tuple[float, str]]:
        groups = self._groups if self._group is None else [self._group]
        return [(1 / len(groups), f"group_{group}/") for group in groups]

    def _columns(self, part: _Part, prefix: str) -> list[tuple[float, str]]:
        """Names and shares of the saved row-wise moments that overlap the part's columns."""
        stem = part.name.rsplit("/", 1)[0]
        start, stop = part.columns
        found = []
        for name in self._saved:
            if match := re.fullmatch(re.escape(prefix + stem) + r"/columns_(\d+)_(\d+)", name):
                overlap = min(stop, int(match[2])) - max(start, int(match[1]))
                if overlap > 0:
                    found.append((overlap / (stop - start), name.removeprefix(prefix)))
        return sorted(found, key=lambda share: share[1]) or [(1.0, part.name)]

    def _add_iterations(self) -> None:
        for table in table_iterations(self._engine):
            name = f"tables/{table}/iteration"
            if name in self._saved:
                self._iterations[table] = torch.zeros((), dtype=torch.int64)
                self._add(name, Rectangle.whole(self._iterations[table]))

    def _add_dense(self) -> None:
        for name, param, state in _torch_states(self._engine, "dense"):
            self._add(f"dense/{name}/weight", Rectangle.whole(param.detach()))
            for key, tensor in empty_like_saved(self._saved, f"dense/{name}/").items():
                if key != "weight":
                    # Adam makes its state with the first step: there is nothing yet to read into.
                    value = tensor if key == "step" else tensor.to(param.device)
                    self._dense.append((state, key, value))
                    self._add(f"dense/{name}/{key}", Rectangle.whole(value))

    def finish(self) -> None:
        """Put what was read where it belongs."""
        for blend in self._blends:
            blend.apply()
        set_table_iterations(self._engine, self._iterations)
        for state, key, value in self._dense:
            state[key] = value


def empty_like_saved(saved: Mapping[str, object], prefix: str) -> dict[str, Tensor]:
    """Uninitialised tensors of the saved shapes, for all names under a prefix; keys are the rest of the name."""
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def own_layout(engine: Engine) -> list[tuple[str, int, int, int, int]]:
    """This rank's rectangles (table, row, column, rows, columns)."""

    def place(shard: Shard) -> tuple[str, int, int, int, int]:
        rows, columns = shard.weight.shape
        return shard.table, shard.row, shard.column, rows, columns

    return [place(shard) for shard in local_shards(engine.model)]
