"""Scores of evaluation rows by how often training saw their rarest id: where in the long tail a rule loses."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.data.dataset import Dataset, RankBatch
from sparse2d.metrics import evaluate_logits


class SeenCounts:
    """How often each id of each feature occurs in some batches.

    Args:
        dataset: whose tables they are of.
        batches: of all ranks together, each training row once.
    """

    def __init__(self, dataset: Dataset, batches: Iterable[RankBatch]) -> None:
        sizes = np.array(dataset.num_embeddings)
        # All tables in one numbering, so that one lookup serves all columns of a batch.
        self._first = np.concatenate([[0], sizes.cumsum()[:-1]])
        self._counts = np.zeros(sizes.sum(), np.int64)
        for batch in batches:
            np.add.at(self._counts, self._places(batch), 1)

    def _places(self, batch: RankBatch) -> NDArray[np.int64]:
        return np.asarray(batch.sparse + np.repeat(self._first, batch.hotness))

    def of_rarest_id(self, batch: RankBatch) -> NDArray[np.int64]:
        """The count of each row's rarest id, [b]."""
        return np.asarray(self._counts[self._places(batch)].min(axis=1))


def scores_by_count(
    logits: NDArray[np.floating], labels: NDArray[np.floating], counts: NDArray[np.number], bounds: Sequence[int]
) -> list[dict[str, Any]]:
    """Metrics of the rows in each bin ``[seen_from, seen_below)`` of counts; the last bin has no end.

    Args:
        logits: [rows].
        labels: 0 or 1, [rows].
        counts: [rows].
        bounds: where bins begin, rising, the first 0.
    """
    bins = np.searchsorted(np.asarray(bounds), counts, side="right") - 1
    scores = []
    for number, (start, stop) in enumerate(zip(bounds, [*bounds[1:], None], strict=True)):
        metrics = evaluate_logits(logits[bins == number], labels[bins == number])
        scores.append({"seen_from": start, "seen_below": stop, **asdict(metrics)})
    return scores
