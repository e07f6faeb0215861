"""Datasets that tests of several packages share."""

from pathlib import Path

import pytest
from configs import tiny_data

from sparse2d.data.prepare import prepare


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared synthetic dataset of 1400 rows."""
    return prepare(tiny_data(tmp_path_factory.mktemp("tiny")), progress=False)
