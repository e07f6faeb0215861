"""Files and folders that get their final name only once they are complete."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield a temporary sibling that takes the name ``final`` on success and is removed on failure.

    The caller makes the sibling, a file or a folder of complete files. A file replaces an older one; a folder that
    another process finished first is kept, and ours is dropped. Content and name are on the disk when this returns.
    """
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        # Else a power cut could leave the name without the content.
        sync(temporary)
        try:
            os.replace(temporary, final)
            sync(final.parent)
        except OSError:
            if not (temporary.is_dir() and final.is_dir()):
                raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            with suppress(FileNotFoundError):
                temporary.unlink()


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
