"""Rows of the real log, where this machine has them."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sparse2d.data.criteo import DENSE_NAMES, FEATURE_NAMES, read_raw
from sparse2d.data.dataset import open_dataset
from sparse2d.data.prepare import prepare

REPOSITORY = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SPARSE2D_REAL_DATA", REPOSITORY.parent / "shared" / "data"))
RAW = FOLDER / "criteo_kaggle_10k.tsv"

pytestmark = pytest.mark.skipif(
    not RAW.is_file(), reason="no criteo_kaggle_10k.tsv in $SPARSE2D_REAL_DATA or ../shared/data"
)


def test_known_facts_hold():
    chunks = list(read_raw(RAW))
    labels = np.concatenate([chunk.labels for chunk in chunks])
    dense = np.concatenate([chunk.dense for chunk in chunks])
    assert len(labels) == 10_000
    assert labels.mean() == pytest.approx(0.2182, abs=1e-9)
    assert dense.min(axis=0).tolist() == [-2 if column == 1 else 0 for column in range(13)]


def test_equals_pandas():
    names = ["label", *DENSE_NAMES, *FEATURE_NAMES]
    table = pd.read_csv(RAW, sep="\t", names=names, dtype=str, keep_default_na=False)
    tokens = np.concatenate([chunk.tokens for chunk in read_raw(RAW)])
    dense = np.concatenate([chunk.dense for chunk in read_raw(RAW)])
    missing = np.concatenate([chunk.tokens_missing for chunk in read_raw(RAW)])
    np.testing.assert_array_equal(tokens, table[[*FEATURE_NAMES]].map(lambda text: int(text or "0", 16)))
    np.testing.assert_array_equal(missing, table[[*FEATURE_NAMES]] == "")
    np.testing.assert_array_equal(dense, table[[*DENSE_NAMES]].replace("", "0").astype("int64"))


def test_prepared_rows_are_usable(config):
    dataset = open_dataset(prepare(config(RAW), progress=False))
    assert (len(dataset.train), len(dataset.eval)) == (8571, 1429)
    assert np.isfinite(dataset.days[0].dense).all()
    assert (np.asarray(dataset.days[0].sparse) < dataset.num_embeddings).all()
    assert dataset.manifest.columns.dense_min[1] == 0.0
