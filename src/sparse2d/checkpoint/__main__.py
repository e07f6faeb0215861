"""``python -m sparse2d.checkpoint list|inspect|verify PATH``: look at checkpoints; needs neither ranks nor TorchRec."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from sparse2d.checkpoint.folder import candidates_at, damaged_files, partial_in, read_manifest
from sparse2d.errors import UserError


def list_checkpoints(path: Path) -> None:
    """One line for each, newest first, with what is wrong with it."""
    for folder in candidates_at(path):
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            print(f"{folder.name}  incomplete: {error}")
            continue
        size = sum(entry.bytes for entry in manifest.files.values())
        layout = f"{manifest.world_size} ranks, {manifest.num_groups} groups"
        print(f"{folder.name}  {manifest.written_at}  {layout}  {size / 2**20:.1f} MiB")
    for folder in [*partial_in(path), *partial_in(path / "checkpoints")]:
        print(f"{folder.name}  incomplete: its writing was cut off")


def inspect(path: Path) -> None:
    """The manifest of the newest one, and the tensors in it."""
    from sparse2d.checkpoint.reader import CheckpointReader

    folder = candidates_at(path)[0]
    described = dataclasses.asdict(read_manifest(folder))
    saved = CheckpointReader(folder).read_metadata().state_dict_metadata
    described["tensors"] = {
        name: f"{str(entry.properties.dtype).removeprefix('torch.')} {list(entry.size)} in {len(entry.chunks)} parts"
        for name, entry in sorted(saved.items())
    }
    print(yaml.safe_dump(described, sort_keys=False), end="")


def verify(path: Path) -> None:
    """Read every file of every one and compare digests.

    Raises:
        UserError: if one is incomplete or damaged.
    """
    bad = []
    for folder in candidates_at(path):
        try:
            manifest = read_manifest(folder)
            flaws = [f"{folder / name} is damaged" for name in damaged_files(folder, manifest.files)]
        except UserError as error:
            flaws = [str(error)]
        print(f"{folder.name}  {'; '.join(flaws) or 'sound'}")
        bad += flaws
    if bad:
        raise UserError(bad[0] if len(bad) == 1 else f"{bad[0]}, and {len(bad) - 1} more")


COMMANDS: dict[str, Callable[[Path], None]] = {"list": list_checkpoints, "inspect": inspect, "verify": verify}


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, run the command, end with one line when it goes wrong."""
    parser = argparse.ArgumentParser(prog="sparse2d.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        assert command.__doc__ is not None
        added = commands.add_parser(name, help=command.__doc__.splitlines()[0])
        added.add_argument("path", type=Path, help="a step-* folder, a folder of them, or a run's folder")
    options = parser.parse_args(arguments)
    try:
        COMMANDS[options.command](options.path)
    except UserError as error:
        sys.exit(f"sparse2d.checkpoint: error: {error}")


if __name__ == "__main__":
    main()
