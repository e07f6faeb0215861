"""Scores by how often training saw a row's rarest id, against counting by hand."""

from collections import Counter

import numpy as np
import pytest

from sparse2d.data.dataset import eval_batches, open_dataset, train_batches
from sparse2d.frequency import SeenCounts, scores_by_count
from sparse2d.metrics import evaluate_logits


def test_the_rarest_id_of_a_row_is_counted_over_the_rows_trained_on(tiny_dataset):
    dataset = open_dataset(tiny_dataset)
    trained = list(train_batches(dataset, 60, 0, 1, max_steps=3, shuffle_seed=1))
    seen = SeenCounts(dataset, iter(trained))
    by_hand = Counter((column, int(row[column])) for batch in trained for row in batch.sparse for column in range(26))
    batch = next(eval_batches(dataset, 200, 0, 1))
    expected = [min(by_hand[column, int(row[column])] for column in range(26)) for row in batch.sparse]
    assert seen.of_rarest_id(batch).tolist() == expected
    assert len(set(expected)) > 1


def test_bins_take_their_lower_bound_and_the_last_one_has_no_end():
    counts = np.array([0, 0, 1, 3, 4, 4, 90, 90])
    labels = np.array([0.0, 1.0] * 4)
    logits = np.linspace(-2, 2, 8)
    scores = scores_by_count(logits, labels, counts, [0, 1, 4])
    assert [(s["seen_from"], s["seen_below"], s["rows"]) for s in scores] == [(0, 1, 2), (1, 4, 2), (4, None, 4)]
    assert scores[2]["ne"] == pytest.approx(evaluate_logits(logits[4:], labels[4:]).ne)
    assert scores_by_count(logits[:1], labels[:1], counts[:1], [0, 1])[1]["ne"] is None
