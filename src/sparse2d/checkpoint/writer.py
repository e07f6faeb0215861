"""Writes a checkpoint's folder: every rank its file, rank 0 the manifest and, last of all, the folder's name."""

import dataclasses
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from sparse2d.checkpoint.folder import PARTIAL, FileEntry, Manifest, publish, remove_old, write_manifest


@dataclasses.dataclass(frozen=True)
class _Written:
    """The files that one rank wrote; travels to rank 0 among upstream's own results."""

    files: dict[str, FileEntry]


class CheckpointWriter(FileSystemWriter):
    """Upstream's writer, whose folder gets its final name only once every file in it is known and synced.

    Args:
        final: the checkpoint's folder; what is written stands under ``final`` + ``.partial`` until then.
        manifest: without files.
        keep: how many checkpoints to leave in the folder above.
    """

    def __init__(self, final: Path, manifest: Manifest, keep: int) -> None:
        self._folder = final.with_name(final.name + PARTIAL)
        super().__init__(self._folder, sync_files=True)
        self._manifest = manifest
        self._keep = keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write this rank's file and take its digest, so that nobody has to read all files for it."""
        results = super().write_data(plan, planner).value()
        names = (path.name for path in self._folder.glob(f"{plan.storage_data.prefix}*"))
        written = _Written({name: FileEntry.of(self._folder / name) for name in names})
        future: Future[list[Any]] = Future()
        future.set_result([*results, written])
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Rank 0, after all ranks have written: the index, the manifest, the final name, and older ones go."""
        written = [result for of_rank in results for result in of_rank if isinstance(result, _Written)]
        super().finish(metadata, [[r for r in of_rank if not isinstance(r, _Written)] for of_rank in results])
        files = {name: entry for of_rank in written for name, entry in of_rank.files.items()}
        index = Path(self._get_metadata_path()).name
        files[index] = FileEntry.of(self._folder / index)
        write_manifest(self._folder, dataclasses.replace(self._manifest, files=dict(sorted(files.items()))))
        final = publish(self._folder)
        remove_old(final.parent, self._keep)
