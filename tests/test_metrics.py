"""NE, AUC, log loss and calibration against scikit-learn and their formulas."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from sparse2d.errors import UserError
from sparse2d.metrics import Metrics, entropy, evaluate_logits, normalized_entropy

# Few distinct logits, so that ties are the rule.
TIED = st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0])
ROWS = st.lists(st.tuples(TIED | st.floats(-8, 8), st.booleans()), min_size=2, max_size=60).filter(
    lambda rows: len({label for _, label in rows}) == 2
)


def split(rows):
    logits, labels = zip(*rows, strict=True)
    return np.array(logits), np.array(labels, dtype=float)


def auc_by_pairs(logits, labels):
    """Share of (positive, negative) pairs in the right order; a tie is half a pair."""
    pairs = [(p > n) + 0.5 * (p == n) for p in logits[labels == 1] for n in logits[labels == 0]]
    return sum(pairs) / len(pairs)


@given(ROWS)
def test_equals_scikit_learn_and_the_formulas(rows):
    logits, labels = split(rows)
    metrics = evaluate_logits(logits, labels)
    base_rate = labels.mean()
    assert metrics.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert metrics.auc == pytest.approx(auc_by_pairs(logits, labels), abs=1e-12)
    assert metrics.logloss == pytest.approx(log_loss(labels, expit(logits)), rel=1e-9)
    constant = log_loss(labels, np.full(len(labels), base_rate))
    assert metrics.ne == pytest.approx(metrics.logloss / constant, rel=1e-9)
    assert metrics.calibration == pytest.approx(expit(logits).sum() / labels.sum(), rel=1e-12)
    assert metrics.rows == len(rows)


@given(ROWS, st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(rows, random):
    shuffled = random.sample(rows, len(rows))
    one, other = evaluate_logits(*split(rows)), evaluate_logits(*split(shuffled))
    assert one.auc == pytest.approx(other.auc, abs=1e-12)
    assert one.ne == pytest.approx(other.ne, rel=1e-12)


@given(ROWS)
def test_constant_at_the_base_rate_scores_one_and_ranks_nothing(rows):
    _, labels = split(rows)
    rate = labels.mean()
    metrics = evaluate_logits(np.full(len(labels), math.log(rate / (1 - rate))), labels)
    assert metrics.ne == pytest.approx(1.0, abs=1e-12)
    assert metrics.auc == 0.5
    assert metrics.calibration == pytest.approx(1.0, abs=1e-12)


@given(ROWS, st.floats(-5, 5))
def test_no_constant_beats_the_base_rate(rows, logit):
    _, labels = split(rows)
    assert evaluate_logits(np.full(len(labels), logit), labels).ne >= 1 - 1e-12


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_kind_of_label_leaves_ne_and_auc_undefined(label):
    metrics = evaluate_logits(np.array([0.5, -1.0, 2.0]), np.full(3, label))
    assert (metrics.ne, metrics.auc, metrics.rows) == (None, None, 3)
    assert metrics.logloss == pytest.approx(log_loss(np.full(3, label), expit([0.5, -1.0, 2.0]), labels=[0, 1]))
    assert (metrics.calibration is None) == (label == 0)


def test_no_rows_leave_everything_undefined():
    assert evaluate_logits(np.empty(0), np.empty(0)) == Metrics(None, None, None, None, rows=0)


@pytest.mark.parametrize("label", [-1.0, 2.0, 0.5, math.nan])
def test_other_labels_are_refused_with_their_row(label):
    with pytest.raises(UserError, match=rf"label {label} of row 2 "):
        evaluate_logits(np.zeros(4), np.array([0, 1, label, 1]))


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_logits_of_a_diverged_model_are_refused(logit):
    with pytest.raises(UserError, match=rf"row 1 is {logit}: training diverged"):
        evaluate_logits(np.array([0.0, logit, 1.0]), np.array([0, 1, 1]))


def test_extreme_logits_stay_finite_and_exact():
    logits, labels = np.array([1000.0, -1000.0, 1000.0, -1000.0]), np.array([1, 0, 0, 1])
    metrics = evaluate_logits(logits, labels)
    # Two rows are certain and right, two are certain and wrong at 1000 nats each.
    assert metrics.logloss == 500.0
    assert metrics.ne == pytest.approx(500 / math.log(2))
    assert metrics.auc == 0.5
    assert metrics.calibration == 1.0


def test_float32_logits_are_scored_in_double_precision():
    logits = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    labels = (np.arange(10_000) % 4 == 0).astype(np.float32)
    exact = log_loss(labels, expit(logits.astype(np.float64)))
    assert evaluate_logits(logits, labels).logloss == pytest.approx(exact, rel=1e-12)


@given(st.floats(0.001, 0.999))
def test_entropy_is_the_least_log_loss(rate):
    assert entropy(rate) == pytest.approx(-rate * math.log(rate) - (1 - rate) * math.log(1 - rate), rel=1e-12)
    assert normalized_entropy(entropy(rate), rate) == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_normalized_entropy_is_undefined_without_both_labels(rate):
    assert normalized_entropy(0.1, rate) is None
