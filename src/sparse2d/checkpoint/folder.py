"""A checkpoint's folder: complete or not there at all, with the digest of every file.

``step-00000120.partial`` takes its final name last, once all ranks have written and synced their files and
``manifest.json``, which lists them. Reading one needs no TorchRec.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse2d.data.atomic import sync
from sparse2d.data.digests import sha256_of
from sparse2d.errors import UserError

SCHEMA = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d{8,})")


# Neither is frozen: OmegaConf, which checks names and types of what is read, could not fill them.
@dataclass
class FileEntry:
    """Size and sha256 of one file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """Read a file as it is now."""
        return cls(path.stat().st_size, sha256_of(path))


@dataclass
class Manifest:
    """What ``manifest.json`` says.

    Attributes:
        step: training steps done.
        fingerprint: of the run that wrote it.
        data_digest: of the rows it trained on.
        global_batch_size: B, which with the step gives the position in the rows.
        world_size: T.
        num_groups: M.
        layout: digest of which rank holds which part of which table.
        sync: the averaging's options, and whether the replicas' ``weights`` and ``moments`` were equal.
        optimizers: whose state it holds, of ``tables`` and ``dense``.
        tables: [rows, dim] by name.
        loss_last: of the last logged point before it; null before the first one.
        written_at: UTC, ISO 8601.
        versions: of what wrote it.
        files: every other file of the folder, by name.
    """

    step: int
    fingerprint: str
    data_digest: str
    global_batch_size: int
    world_size: int
    num_groups: int
    layout: str
    sync: dict[str, Any]
    optimizers: dict[str, str]
    tables: dict[str, list[int]]
    loss_last: float | None
    written_at: str
    versions: dict[str, str | None]
    files: dict[str, FileEntry] = field(default_factory=dict)
    schema: int = SCHEMA


def folder_name(step: int) -> str:
    """``step-00000120``: sorts by step."""
    return f"step-{step:08d}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a folder, on disk when this returns."""
    path = folder / MANIFEST
    path.write_text(json.dumps(asdict(manifest), indent=2, allow_nan=False), encoding="utf-8")
    sync(path)


def publish(partial: Path) -> Path:
    """Give a finished folder its final name, on disk when this returns; a damaged one of that name goes."""
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    sync(partial)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    sync(final.parent)
    return final


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder whose files all have the sizes that it lists.

    Raises:
        UserError: if it is incomplete; the text says what is missing.
    """
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise UserError(f"{folder}: schema {content['schema']}, expected {SCHEMA}: written by another version")
        manifest = cast(Manifest, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Manifest), content)))
    except FileNotFoundError:
        raise UserError(f"{folder}: no {MANIFEST}: not a checkpoint, or an incomplete one") from None
    except (ValueError, KeyError, TypeError, NotADirectoryError, OmegaConfBaseException) as error:
        raise UserError(f"{folder / MANIFEST} is damaged: {str(error).splitlines()[0]}") from None
    if not manifest.files:
        raise UserError(f"{folder / MANIFEST} is damaged: it lists no files")
    for name, entry in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "missing" if size is None else f"{size} bytes long"
            raise UserError(f"{path} is {found}, expected {entry.bytes} bytes")
    return manifest


def damaged_files(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Names among ``files`` whose content no longer has its digest."""
    return [name for name, entry in files.items() if FileEntry.of(folder / name) != entry]


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders that bear a checkpoint's final name, newest first; whether they are sound is another question."""
    found = [(int(match[1]), path) for path in _children(folder) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def step_of(folder: Path) -> int:
    """The step that a checkpoint's final name says."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def partial_in(folder: Path) -> list[Path]:
    """Folders that a save left unfinished."""
    return [path for path in _children(folder) if path.name.endswith(PARTIAL)]


def _children(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def candidates_at(path: Path) -> list[Path]:
    """Checkpoints at a path, newest first: itself, those in it, or those of a run's folder.

    Raises:
        UserError: if there is none.
    """
    if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
        return [path]
    found = checkpoints_in(path) or checkpoints_in(path / "checkpoints")
    if not found:
        raise UserError(f"{path}: no checkpoint there; give a step-* folder, or a folder that holds some")
    return found


def refuse_beyond(path: Path, steps: int) -> None:
    """Refuse to go on from what is at a path if the newest complete one there is of a step beyond a run's ``steps``."""
    complete = (folder for folder in candidates_at(path) if _is_complete(folder))
    newest = next(complete, None)
    if newest is not None and (step := read_manifest(newest).step) > steps:
        raise UserError(
            f"{newest} is of step {step}, beyond the {steps} steps of this run: raise max_steps, or resume an earlier"
        )


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except UserError:
        return False
    return True


def remove_old(folder: Path, keep: int) -> None:
    """Keep the newest ``keep`` checkpoints."""
    for path in checkpoints_in(folder)[keep:]:
        # Renamed first, so that a kill in the middle leaves no half of one under its final name.
        doomed = path.with_name(path.name + PARTIAL)
        os.replace(path, doomed)
        shutil.rmtree(doomed)
