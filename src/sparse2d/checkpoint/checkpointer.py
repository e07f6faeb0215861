"""When checkpoints are written and which one a run goes on from."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from sparse2d.checkpoint.contents import MOMENT, WEIGHT, EngineLoad, empty_like_saved, engine_state, own_layout
from sparse2d.checkpoint.folder import (
    Manifest,
    candidates_at,
    checkpoints_in,
    damaged_files,
    folder_name,
    partial_in,
    read_manifest,
    remove_old,
)
from sparse2d.checkpoint.local_state import flatten, rng_state, set_rng_state, unflatten
from sparse2d.checkpoint.reader import CheckpointReader
from sparse2d.checkpoint.rectangles import Rectangle, RectangleLoadPlanner, RectangleSavePlanner, Staging
from sparse2d.checkpoint.writer import CheckpointWriter
from sparse2d.config import SyncMoments, TableOptimizer, TrainConfig
from sparse2d.engine import Engine
from sparse2d.environment import found_versions
from sparse2d.errors import UserError
from sparse2d.mesh import Mesh, RankInfo, helper_group
from sparse2d.records import plain

log = logging.getLogger(__name__)

# A run that failed does not wait longer for a save in the background.
ABANDON_S = 3.0


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        step: done so far; 0 = from the start.
        path: the checkpoint; None without one.
        loss_last: of the last logged point before it.
        window: this rank's open window of metrics; empty if another layout wrote the checkpoint.
    """

    step: int = 0
    path: Path | None = None
    loss_last: float | None = None
    window: Mapping[str, Any] | None = None


class Checkpointer:
    """Saves and restores one run; all methods are collectives over all ranks. Does nothing without an interval.

    Args:
        config: of the run.
        engine: what is saved.
        rank: this one.
        folder: where the run's checkpoints go.
        fingerprint: of the run.
        data_digest: of the rows.
    """

    def __init__(
        self, config: TrainConfig, engine: Engine, rank: RankInfo, folder: Path, fingerprint: str, data_digest: str
    ) -> None:
        self._config = config
        self._engine = engine
        self._rank = rank
        self._folder = folder
        self._fingerprint = fingerprint
        self._data_digest = data_digest
        self._mesh = Mesh(
            rank.world_size * config.ranks_per_process, config.parallelism.num_groups, config.parallelism.replicas
        )
        self._group = self._mesh.group_of(rank.rank)
        self._staging = Staging()
        self._saving: Future[Any] | None = None
        self._saving_step = 0
        self._saved_step = -1
        self.is_on = config.checkpoint.interval is not None
        if self.is_on:
            # Collectives of a save in the background must not mix with those of training.
            self._process_group = helper_group()
            self._layout = self._layout_digest()
            if rank.is_first:
                folder.mkdir(parents=True, exist_ok=True)

    def _layout_digest(self) -> str:
        layouts: list[Any] = [None] * self._rank.world_size
        dist.all_gather_object(layouts, own_layout(self._engine))
        described = [[group for group in self._mesh.groups], layouts]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._saving is not None:
            with suppress(BaseException):
                self._saving.exception(timeout=None if kind is None else ABANDON_S)
        self._staging.close()

    # Saving

    def is_due(self, step: int) -> bool:
        """Whether ``step`` (1-based) is a multiple of the interval."""
        interval = self._config.checkpoint.interval
        return interval is not None and step % interval == 0

    def poll(self) -> None:
        """Call after each step.

        Raises:
            UserError: if a save in the background has failed.
        """
        if self._saving is not None and self._saving.done():
            self._wait()

    def save(self, step: int, window: Mapping[str, Any], loss_last: float | None, *, waits: bool) -> None:
        """Write the checkpoint of ``step``, unless there is one.

        Args:
            step: 1-based, just done.
            window: this rank's open window of metrics, tensors and numbers.
            loss_last: of the last logged point.
            waits: whether it has to be on disk on return; else ``checkpoint.asynchronous`` decides.

        Raises:
            UserError: if it, or one in the background before it, cannot be written.
        """
        if not self.is_on:
            return
        if step == self._saved_step:
            if waits:
                self._wait()
            return
        if self._saving is not None and not self._saving.done():
            log.info("waiting for the checkpoint of step %d, which is still being written", self._saving_step)
        self._wait()
        different = self._different(step)
        state = engine_state(self._engine, self._group, different)
        for name, tensor in self._local_state(window).items():
            state[f"rank_{self._rank.rank}/{name}"] = [Rectangle.whole(tensor)]
        manifest = self._manifest(step, different, loss_last)
        writer = CheckpointWriter(self._folder / folder_name(step), manifest, self._config.checkpoint.keep)
        self._saving_step = self._saved_step = step
        options = {"storage_writer": writer, "planner": RectangleSavePlanner(), "process_group": self._process_group}
        if not waits and self._config.checkpoint.asynchronous:
            self._saving = dcp.async_save(state, async_stager=self._staging, **options)
            return
        try:
            dcp.save(state, **options)
        except CheckpointException as error:
            raise self._failed(error) from None

    def keep_only_newest(self) -> None:
        """What a finished run leaves: its last checkpoint."""
        if self.is_on and self._rank.is_first:
            remove_old(self._folder, keep=1)

    def _wait(self) -> None:
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            saving.result()
        except CheckpointException as error:
            raise self._failed(error) from None

    def _failed(self, error: CheckpointException) -> UserError:
        rank, (cause, _) = min(error.failures.items())
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
        return UserError(
            f"cannot write the checkpoint of step {self._saving_step}: rank {rank}: {reason}; {self._folder} must be "
            "writable, with room"
        )

    def _different(self, step: int) -> frozenset[str]:
        """What differs between the replicas after ``step``."""
        if self._mesh.num_groups == 1:
            return frozenset()
        if step % self._config.sync.interval != 0:
            return frozenset({WEIGHT, MOMENT})
        return frozenset() if self._config.sync.moments is SyncMoments.with_weights else frozenset({MOMENT})

    def _local_state(self, window: Mapping[str, Any]) -> dict[str, Tensor]:
        averager = self._engine.averager
        return (
            flatten(rng_state(self._engine.device), "rng")
            | flatten(averager.state_dict() if isinstance(averager, Stateful) else None, "averager")
            | flatten(self._compressors_state(), "compressors")
            | flatten(window, "window")
        )

    def _compressors_state(self) -> dict[str, Any]:
        """State of what compresses, by name, with the options that it belongs to."""
        options = plain(self._config.compression)
        return {
            name: {"options": options[name], "state": compressor.state_dict()}
            for name, compressor in self._engine.compressors.items()
        }

    def _load_compressors(self, saved: Mapping[str, Any]) -> None:
        """Set the state of what compresses, as far as it is there and was made with the same options."""
        options = plain(self._config.compression)
        for name, compressor in self._engine.compressors.items():
            if name in saved and saved[name]["options"] == options[name]:
                compressor.load_state_dict(saved[name]["state"])
            else:
                log.info("nothing held back by compression.%s is loaded: it was another one, or none", name)

    def _manifest(self, step: int, different: frozenset[str], loss_last: float | None) -> Manifest:
        config = self._config
        return Manifest(
            step=step,
            fingerprint=self._fingerprint,
            data_digest=self._data_digest,
            global_batch_size=config.global_batch_size,
            world_size=self._rank.world_size,
            num_groups=self._mesh.num_groups,
            layout=self._layout,
            sync={
                "interval": config.sync.interval,
                "moments": config.sync.moments.name,
                "weights_equal": WEIGHT not in different,
                "moments_equal": MOMENT not in different,
            },
            optimizers=_optimizers(config),
            tables={name: list(shape) for name, shape in self._engine.table_shapes.items()},
            loss_last=loss_last,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=found_versions(),
        )

    # Resuming

    def resume(self, rehearse: Callable[[], None]) -> Resumed:
        """Load the newest sound checkpoint: of the run's own folder, else at ``checkpoint.resume`` if that is a path.

        Args:
            rehearse: a step whose effects are overwritten; called where the rest of the run is to be the same bit for
                bit (see ``Engine.rehearse``).

        Raises:
            UserError: if there is none at the path, or it does not fit this run.
        """
        if not self.is_on and self._config.checkpoint.resume_path is None:
            return Resumed()
        if self._rank.is_first:
            for path in partial_in(self._folder):
                log.warning("%s: skipped and removed, its writing was cut off", path)
                shutil.rmtree(path)
        found = self._newest_sound(self._on_first(lambda: checkpoints_in(self._folder)))
        outside = self._config.checkpoint.resume_path
        if found is None and outside is not None:
            found = self._newest_sound(self._on_first(lambda: candidates_at(outside)))
            if found is None:
                raise UserError(f"checkpoint.resume={outside}: no sound checkpoint there")
        return Resumed() if found is None else self._load(found, rehearse)

    def _on_first(self, ask: Any) -> Any:
        """Rank 0's answer, on all ranks: others may see a shared folder later. An error is raised on all."""
        answer: list[Any] = [None]
        if self._rank.is_first:
            try:
                answer = [ask()]
            except UserError as error:
                answer = [error]
        dist.broadcast_object_list(answer)
        if isinstance(answer[0], UserError):
            raise answer[0]
        return answer[0]

    def _newest_sound(self, candidates: list[Path]) -> Path | None:
        """The first whose files are all there and have their digests; what is skipped is said."""
        for path in candidates:
            reason = self._flaw(path)
            if reason is None:
                return path
            log.warning("checkpoint skipped: %s", reason)
        return None

    def _flaw(self, path: Path) -> str | None:
        """Why a checkpoint cannot be used; every rank reads its share of the files."""
        own: str | None = None
        try:
            files = list(read_manifest(path).files.items())
            if damaged := damaged_files(path, dict(files[self._rank.rank :: self._rank.world_size])):
                own = f"{path / damaged[0]} is damaged: its content does not have the digest it was written with"
        except (UserError, OSError) as error:
            own = str(error)
        flaws: list[str | None] = [None] * self._rank.world_size
        dist.all_gather_object(flaws, own)
        return next((flaw for flaw in flaws if flaw is not None), None)

    def _load(self, path: Path, rehearse: Callable[[], None]) -> Resumed:
        manifest = read_manifest(path)
        _check_fits(manifest, self._config, self._data_digest, self._engine, path)
        layout = self._layout if self.is_on else self._layout_digest()
        same_layout = manifest.layout == layout
        if same_layout:
            fresh = self._compressors_state()
            for _ in range(min(manifest.step, 2)):
                rehearse()
        own_copy = same_layout or (manifest.sync["weights_equal"] and manifest.num_groups == self._mesh.num_groups)
        metadata = CheckpointReader(path).read_metadata()
        load = EngineLoad(self._engine, metadata, self._group if own_copy else None)
        local = empty_like_saved(metadata.state_dict_metadata, f"rank_{self._rank.rank}/") if same_layout else {}
        state = load.state | {
            f"rank_{self._rank.rank}/{name}": [Rectangle.whole(tensor)] for name, tensor in local.items()
        }
        try:
            dcp.load(state, storage_reader=CheckpointReader(path), planner=RectangleLoadPlanner())
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise UserError(f"cannot read {path}: rank {rank}: {str(cause).splitlines()[0]}") from None
        load.finish()
        if same_layout:
            set_rng_state(unflatten(local, "rng"), self._engine.device)
            if isinstance(averager := self._engine.averager, Stateful):
                averager.load_state_dict(unflatten(local, "averager"))
            # What a rehearsal held back is no part of the run.
            self._load_compressors(fresh)
            if "compressors/structure" in local:
                self._load_compressors(unflatten(local, "compressors"))
        else:
            log.info("%s is of another layout: what belongs to single ranks is left out%s", path, _blended(manifest))
        self._saved_step = manifest.step if path.parent == self._folder else -1
        log.info("resumed from %s (step %d)", path, manifest.step)
        window = unflatten(local, "window") if same_layout else None
        return Resumed(manifest.step, path, manifest.loss_last, window)


def _optimizers(config: TrainConfig) -> dict[str, str]:
    """Names that decide which state there is; the scaled moment is kept unscaled."""
    tables = config.optimizer.name
    if tables is TableOptimizer.momentum_scaled_rowwise_adagrad:
        tables = TableOptimizer.rowwise_adagrad
    return {"tables": tables.name, "dense": config.optimizer.dense.name.name}


def _blended(manifest: Manifest) -> str:
    return "" if manifest.sync["weights_equal"] else "; the replicas, saved between averagings, are averaged"


def _check_fits(manifest: Manifest, config: TrainConfig, data_digest: str, engine: Engine, path: Path) -> None:
    """Refuse a checkpoint that this run cannot go on from."""
    if manifest.data_digest != data_digest:
        raise UserError(f"{path} was trained on data {manifest.data_digest[:16]}, this run reads {data_digest[:16]}")
    if manifest.global_batch_size != config.global_batch_size:
        raise UserError(
            f"{path} has global_batch_size={manifest.global_batch_size}, this run {config.global_batch_size}: "
            f"step {manifest.step} would be at other rows; use the same"
        )
    for name, shape in engine.table_shapes.items():
        if manifest.tables.get(name) != list(shape):
            raise UserError(f"{path}: table {name} is {manifest.tables.get(name)} there and {list(shape)} here")
    if manifest.optimizers != (here := _optimizers(config)):
        raise UserError(f"{path} holds the state of {manifest.optimizers}, this run needs {here}")
