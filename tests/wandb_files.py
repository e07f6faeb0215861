"""wandb's offline files, read without wandb's help: its Python package only writes them."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record, RunRecord

# A LevelDB log: blocks of 32 KiB, records split into parts under a header of checksum, length and kind.
BLOCK_BYTES = 32_768
HEADER = struct.Struct("<IHB")
FILE_HEADER_BYTES = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def offline_runs(run_dir: Path) -> list[Path]:
    """The ``.wandb`` file of each offline run under a run's folder."""
    return sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))


def records(path: Path) -> Iterator[Record]:
    """Everything one offline run holds, in order."""
    data, place, whole = path.read_bytes(), FILE_HEADER_BYTES, b""
    assert data[:4] == b":W&B"
    while place + HEADER.size <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < HEADER.size:
            place += left
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        if kind == 0:  # padding at the end of a file that was not closed
            return
        part = data[place + HEADER.size : place + HEADER.size + length]
        place += HEADER.size + length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(whole)
            yield record


def exit_codes(path: Path) -> list[int]:
    """Exit codes that a run was finished with: one, or none if it was cut off."""
    return [record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit"]


def logged_steps(path: Path) -> list[int]:
    """The steps at which something was logged."""
    return [record.history.step.num for record in records(path) if record.WhichOneof("record_type") == "history"]


def started_as(path: Path) -> RunRecord:
    """What a run says of itself at its start: group, name, config."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def logged_keys(path: Path) -> set[str]:
    """Names of everything that was logged."""
    items = [item for record in records(path) for item in record.history.item]
    return {item.key or "/".join(item.nested_key) for item in items}


def summary_of(path: Path) -> dict[str, Any]:
    """A run's summary as it was set last."""
    items = [item for record in records(path) for item in record.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
