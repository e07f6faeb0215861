"""Digests of files, and what is known of files that have not changed since."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from sparse2d.data.atomic import replacing


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class KnownDigests:
    """Digests that were computed before, for files whose size and time of change are still the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[object]] = {}
        with suppress(FileNotFoundError, ValueError):
            self._known = json.loads(path.read_text(encoding="utf-8"))

    def get(self, file: Path) -> str | None:
        """The digest, unless the file has changed or was never read."""
        entry = self._known.get(str(file.resolve()))
        return str(entry[2]) if entry is not None and entry[:2] == _state(file) else None

    def get_or_read(self, file: Path) -> str:
        """The digest, from the file itself if need be."""
        known = self.get(file)
        if known is None:
            known = sha256_of(file)
            self.put(file, known)
        return known

    def put(self, file: Path, sha256: str) -> None:
        """Keep a digest of the file as it is now."""
        self._known[str(file.resolve())] = [*_state(file), sha256]
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(self._known), encoding="utf-8")


def _state(file: Path) -> list[object]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]
