"""``python -m sparse2d.preprocess``: raw Criteo rows (or synthetic ones) to the arrays that training reads."""

import logging
from pathlib import Path

from sparse2d.cli import run_entry_point
from sparse2d.config import PreprocessConfig
from sparse2d.data.dataset import open_dataset
from sparse2d.data.manifest import read_manifest
from sparse2d.data.prepare import prepare, prepared_folder
from sparse2d.data.verify import verify
from sparse2d.errors import UserError

log = logging.getLogger("sparse2d.preprocess")


def main(config: PreprocessConfig) -> None:
    """Prepare one dataset and say what is in it, or verify one that was prepared before."""
    if config.check:
        check(prepared_folder(config.data))
        return
    dataset = open_dataset(prepare(config.data))
    log.info(
        "%s: %d rows; train %d..%d, eval %d..%d; base rate %.4f; %d table rows -> %s",
        dataset.name,
        dataset.manifest.rows,
        dataset.train.start,
        dataset.train.stop,
        dataset.eval.start,
        dataset.eval.stop,
        dataset.base_rate,
        sum(dataset.num_embeddings),
        dataset.path,
    )


def check(folder: Path) -> None:
    """Verify a prepared folder.

    Raises:
        UserError: with the first fault, if there is any; all of them are logged.
    """
    faults = verify(folder)
    for fault in faults:
        log.error("%s", fault)
    if faults:
        raise UserError(f"{folder} is not sound (faults: {len(faults)}): {faults[0]}; delete it and prepare it again")
    manifest = read_manifest(folder)
    log.info("%s is sound: %d files, %d rows, digest %s", folder, len(manifest.files), manifest.rows, manifest.digest)


if __name__ == "__main__":
    run_entry_point("preprocess", PreprocessConfig, main)
