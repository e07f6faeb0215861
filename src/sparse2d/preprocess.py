"""``python -m sparse2d.preprocess``: raw Criteo rows (or synthetic ones) to the arrays that training reads."""

import logging

from sparse2d.cli import run_entry_point
from sparse2d.config import PreprocessConfig
from sparse2d.data.dataset import open_dataset
from sparse2d.data.prepare import prepare

log = logging.getLogger("sparse2d.preprocess")


def main(config: PreprocessConfig) -> None:
    """Prepare one dataset and say what is in it."""
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


if __name__ == "__main__":
    run_entry_point("preprocess", PreprocessConfig, main)
