"""Raw files: which days a folder holds, and their text in pieces of whole lines, plain, gzip or Zstandard."""

import gzip
import io
import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import zstandard

from sparse2d.data.criteo import LONGEST_LINE
from sparse2d.errors import UserError

log = logging.getLogger(__name__)

# A thousand rows: what is made of them stays in the cache, and the allocator reuses its memory (2 MB take half as long
# again for each row), while Python's share of the time is small.
PIECE_BYTES = 1 << 18

_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ARCHIVES = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z"}
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_DAY = re.compile(r"day_(\d+)(\.tsv|\.txt)?(\.gz|\.zst)?")
_TRAIN = re.compile(r"train(\.tsv|\.txt)?(\.gz|\.zst)?")


class Digest(Protocol):
    """What hashlib's objects do."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""


def find_days(folder: Path, wanted: Sequence[int] | None) -> dict[int, Path]:
    """The raw file of each day in a folder, in numeric order; a lone ``train.txt`` is day 0.

    Raises:
        UserError: naming days that are there twice or not at all, or if there are none.
    """
    files: dict[int, list[Path]] = defaultdict(list)
    strangers = []
    for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        if match := _DAY.fullmatch(path.name):
            files[int(match[1])].append(path)
        elif _TRAIN.fullmatch(path.name):
            files[0].append(path)
        elif path.is_file():
            strangers.append(path.name)
    if not files:
        raise UserError(
            f"{folder} has no manifest.json and no raw days; expected a folder that sparse2d.preprocess wrote, "
            "or day_0, day_1, ... or train.txt, plain, .gz or .zst"
        )
    if strangers:
        log.warning("%s: not raw days, left alone: %s", folder, ", ".join(strangers))
    days = sorted(files) if wanted is None else sorted(wanted)
    if missing := [day for day in (range(days[0], days[-1] + 1) if wanted is None else days) if day not in files]:
        raise UserError(
            f"{folder}: no file for {_names(missing)} beside {_names(sorted(files))}; "
            f"add it, or choose with data.days={sorted(set(days) & set(files))}"
        )
    if double := [path.name for day in days if len(files[day]) > 1 for path in files[day]]:
        raise UserError(f"{folder}: several files for one day: {', '.join(double)}; keep one of each")
    if broken := [path.name for day in days for path in files[day] if not path.is_file()]:
        raise UserError(
            f"{folder}: not a file (a folder, or a link to nothing): {', '.join(broken)}; put the day there"
        )
    return {day: files[day][0] for day in days}


def _names(days: Sequence[int]) -> str:
    return ", ".join(f"day_{day}" for day in days)


def read_text(path: Path, digest: Digest, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[bytes, int]]:
    """Yield whole lines, each ended by a line feed, and how many bytes of the file have been read so far.

    The compression is told by the content. ``digest`` sees the file's own bytes. A line longer than any valid one is
    cut, not gathered: it stays one bad line.

    Raises:
        UserError: if the compressed stream is damaged or the file changes meanwhile.
    """
    before = path.stat()
    with path.open("rb", buffering=0) as raw:
        file = _Digesting(raw, digest)
        rest = b""
        for number, piece in enumerate(_decompressed(path, file, piece_bytes)):
            if number == 0:
                _refuse_archives(path, piece)
            text = rest + piece
            end = text.rfind(b"\n") + 1
            if end:
                yield text[:end], file.done
            rest = text[end:]
            if len(rest) > LONGEST_LINE:
                rest = rest[: LONGEST_LINE + 1]
        if rest:
            yield rest + b"\n", file.done
    after = path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError(f"{path} changed while it was read; run the command again")


def _refuse_archives(path: Path, start: bytes) -> None:
    """Refuse what is no text, by name: the Kaggle rows are offered as a tar archive."""
    kind = next((kind for magic, kind in _ARCHIVES.items() if start.startswith(magic)), None)
    if start[_TAR_MAGIC_AT:].startswith(_TAR_MAGIC):
        kind = "tar"
    if kind:
        raise UserError(f"{path}: a {kind} archive; unpack it and give the file inside, plain, .gz or .zst")


class _Digesting:
    """A file whose every byte goes through a digest, once and in order."""

    def __init__(self, raw: io.FileIO, digest: Digest) -> None:
        self._raw = raw
        self._digest = digest
        self.done = 0

    def read(self, size: int) -> bytes:
        """Read some bytes, none at the end."""
        data = self._raw.read(size) or b""
        self._digest.update(data)
        self.done += len(data)
        return data


def _decompressed(path: Path, file: _Digesting, piece_bytes: int) -> Iterator[bytes]:
    first = file.read(max(piece_bytes, len(_ZSTD_MAGIC)))
    try:
        if first.startswith(_GZIP_MAGIC):
            yield from _pieces(gzip.GzipFile(fileobj=cast(BinaryIO, _Chained(first, file))), piece_bytes)
        elif first.startswith(_ZSTD_MAGIC):
            yield from _unzstd(first, file, piece_bytes)
        else:
            yield first
            yield from _pieces(file, piece_bytes)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path}: damaged compressed stream ({error}); copy or download the file again") from error


def _pieces(file: "_Digesting | gzip.GzipFile", piece_bytes: int) -> Iterator[bytes]:
    while piece := file.read(piece_bytes):
        yield piece


class _Chained:
    """A file whose first bytes have been read already."""

    def __init__(self, first: bytes, file: _Digesting) -> None:
        self._first = io.BytesIO(first)
        self._file = file

    def read(self, size: int) -> bytes:
        """Read some bytes, none at the end."""
        return self._first.read(size) or self._file.read(size)


def _unzstd(first: bytes, file: _Digesting, piece_bytes: int) -> Iterator[bytes]:
    """Frames one after another; the library's own stream reader takes a file that was cut short for a whole one."""
    compressed, step = first, max(piece_bytes // 8, 1)
    while compressed:
        frame = zstandard.ZstdDecompressor().decompressobj()
        while not frame.eof:
            if not compressed:
                raise EOFError("it ends before its last frame does")
            text = frame.decompress(compressed)
            if text:
                yield text
            compressed = frame.unused_data if frame.eof else file.read(step)
        compressed = compressed or file.read(step)
