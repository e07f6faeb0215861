"""The generated rows against the options that asked for them."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import log_loss

from sparse2d.config import SyntheticConfig
from sparse2d.data.criteo import RawRows, dense_features, read_raw
from sparse2d.data.synthetic import (
    _GUIDE,
    CHUNK_ROWS,
    Inputs,
    _invert,
    plant_teacher,
    teacher_figures,
    vocabulary_sizes,
    write_raw,
)
from sparse2d.errors import UserError

TABLE_ROWS = [30, 200, 100_000, 3, 5000, *[1000] * 21]
CONFIG = SyntheticConfig(
    rows=40_000, seed=5, base_rate=0.2, vocabulary_scale=0.01, missing_rate=0.15, zipf_exponent=1.2
)
VOCABULARY = [3, 3, 1000, 3, 50, *[10] * 21]


def read(path) -> RawRows:
    chunks = list(read_raw(path))
    fields = ("labels", "dense", "dense_missing", "tokens", "tokens_missing")
    return RawRows(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in fields))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    heard = []
    write_raw(folder / "raw.tsv", folder / "logits.npy", CONFIG, TABLE_ROWS, heard.append)
    assert heard == [*range(CHUNK_ROWS, CONFIG.rows, CHUNK_ROWS), CONFIG.rows]
    return folder


@pytest.fixture(scope="module")
def rows(written):
    return read(written / "raw.tsv")


@pytest.fixture(scope="module")
def logits(written):
    return np.load(written / "logits.npy")


def test_labels_have_the_base_rate_and_logits_the_spread(rows, logits):
    assert len(rows) == len(logits) == CONFIG.rows
    # Four standard errors of 40,000 draws, and of the 65,536 rows that the bias is solved on.
    assert rows.labels.mean() == pytest.approx(0.2, abs=0.012)
    assert expit(logits).mean() == pytest.approx(0.2, abs=0.008)
    assert logits.std() == pytest.approx(CONFIG.logit_std, rel=0.03)


def test_labels_are_drawn_from_the_logits(rows, logits):
    order = np.argsort(logits).reshape(10, -1)
    shares, expected = rows.labels[order].mean(axis=1), expit(logits)[order].mean(axis=1)
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / np.sqrt(4000))
    assert shares[-1] > shares[0] + 0.4


def test_teacher_figures_are_scikit_learns(rows, logits):
    figures = teacher_figures(logits, rows.labels)
    constant = log_loss(rows.labels, np.full(len(rows), rows.labels.mean()))
    assert figures["logloss"] == pytest.approx(log_loss(rows.labels, expit(logits)), rel=1e-9)
    assert figures["ne"] == pytest.approx(figures["logloss"] / constant, rel=1e-9)
    assert 0.5 < figures["ne"] < 0.95
    assert teacher_figures(logits[:3], np.zeros(3, np.int32))["ne"] is None


def test_no_other_scale_or_bias_of_the_teacher_does_better(rows, logits):
    best = teacher_figures(logits, rows.labels)["logloss"]
    for worse in (0.8 * logits, 1.25 * logits, logits + 0.2, logits - 0.2):
        assert teacher_figures(worse, rows.labels)["logloss"] > best


def test_teacher_is_additive(rows, logits):
    """A least-squares fit on one-hot ids and mapped dense values leaves nothing."""
    # C3 has more ids than can be fitted: look where it is missing.
    keep = rows.tokens_missing[:, 2]
    tokens, missing = rows.tokens[keep], rows.tokens_missing[keep]
    columns = [np.ones(keep.sum()), *dense_features(rows.dense[keep], rows.dense_missing[keep]).T]
    for f in range(26):
        present = ~missing[:, f]
        columns += [present & (tokens[:, f] == token) for token in np.unique(tokens[present, f])]
    design = np.stack(columns, axis=1).astype(np.float64)
    assert design.shape[1] < len(design) / 10
    fit, *_ = np.linalg.lstsq(design, logits[keep], rcond=None)
    np.testing.assert_allclose(design @ fit, logits[keep], atol=1e-6)


def test_missing_ids_have_no_effect_and_missing_dense_values_that_of_a_zero():
    teacher = plant_teacher(CONFIG, TABLE_ROWS)
    nothing = Inputs(np.full((1, 13), 7), np.ones((1, 13), bool), np.array([VOCABULARY]))
    expected = teacher.bias + teacher.scale * math.log(3) * teacher.dense_weights.sum()
    np.testing.assert_allclose(teacher.logits(nothing), expected, rtol=1e-6)


def test_vocabularies_have_their_sizes(rows):
    assert vocabulary_sizes(CONFIG, TABLE_ROWS) == VOCABULARY
    for f, size in enumerate(VOCABULARY):
        distinct = np.unique(rows.tokens[~rows.tokens_missing[:, f], f])
        assert 0.95 * size <= len(distinct) <= size


def test_tokens_stay_apart_in_their_tables(rows):
    for f, (size, table) in enumerate(zip(VOCABULARY, TABLE_ROWS, strict=True)):
        distinct = np.unique(rows.tokens[~rows.tokens_missing[:, f], f]) % table
        if size < table:
            assert len(np.unique(distinct)) == len(distinct)
            assert 0 not in distinct
    assert rows.tokens.max() > 2**31


def test_ids_follow_the_power_law(rows):
    tokens = rows.tokens[~rows.tokens_missing[:, 2], 2]
    counts = np.sort(np.unique(tokens, return_counts=True)[1])[::-1][:50]
    slope = np.polyfit(np.log(np.arange(1, 51)), np.log(counts), 1)[0]
    assert slope == pytest.approx(-CONFIG.zipf_exponent, abs=0.08)
    top_share = 1 / (np.arange(1, 1001, dtype=float) ** -1.2).sum()
    assert counts[0] / len(tokens) == pytest.approx(top_share, abs=0.01)


def test_missing_values_have_their_rate_in_every_column(rows):
    for missing in (rows.dense_missing, rows.tokens_missing):
        np.testing.assert_allclose(missing.mean(axis=0), 0.15, atol=4 * np.sqrt(0.15 * 0.85 / CONFIG.rows) + 1e-9)
    both = (rows.dense_missing[:, 0] & rows.tokens_missing[:, 0]).mean()
    assert both == pytest.approx(0.15**2, abs=0.005)


def test_only_i2_is_negative_and_counts_have_heavy_tails(rows):
    assert (rows.dense.min(axis=0) < 0).tolist() == [column == 1 for column in range(13)]
    assert set(rows.dense[rows.dense < 0].tolist()) == {-1, -2}
    present = ~rows.dense_missing[:, 1]
    assert (rows.dense[present, 1] == -1).mean() == pytest.approx(0.1, abs=0.01)
    for f in range(13):
        values = rows.dense[~rows.dense_missing[:, f], f]
        assert values.max() > 10 * np.median(values)


def test_tokens_are_written_as_eight_lowercase_digits(written):
    with (written / "raw.tsv").open() as file:
        texts = {text for _, row in zip(range(2000), file, strict=False) for text in row[:-1].split("\t")[14:]}
    assert {len(text) for text in texts} == {0, 8}
    assert "".join(texts) == "".join(texts).lower()
    assert any(text.startswith("0") for text in texts)


def test_same_seed_gives_the_same_bytes_and_another_does_not(written, rows, tmp_path):
    write_raw(tmp_path / "again.tsv", tmp_path / "again.npy", CONFIG, TABLE_ROWS)
    assert (tmp_path / "again.tsv").read_bytes() == (written / "raw.tsv").read_bytes()
    assert (tmp_path / "again.npy").read_bytes() == (written / "logits.npy").read_bytes()
    other = dataclasses.replace(CONFIG, rows=1000, seed=6)
    write_raw(tmp_path / "other.tsv", tmp_path / "other.npy", other, TABLE_ROWS)
    assert np.corrcoef(np.load(tmp_path / "other.npy"), np.load(written / "logits.npy")[:1000])[0, 1] < 0.2
    shared = np.intersect1d(read(tmp_path / "other.tsv").tokens[:, 2], rows.tokens[:, 2])
    assert len(shared) < 3


@pytest.mark.parametrize("fewer", [1, 100, CHUNK_ROWS, CHUNK_ROWS + 1, 2 * CHUNK_ROWS - 1])
def test_rows_do_not_depend_on_how_many_are_asked_for(written, tmp_path, logits, fewer):
    write_raw(tmp_path / "raw.tsv", tmp_path / "logits.npy", dataclasses.replace(CONFIG, rows=fewer), TABLE_ROWS)
    text = (tmp_path / "raw.tsv").read_bytes()
    assert text.count(b"\n") == fewer
    assert (written / "raw.tsv").read_bytes().startswith(text)
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), logits[:fewer])


def test_chunks_differ_and_are_drawn_in_any_order():
    teacher = plant_teacher(CONFIG, TABLE_ROWS)
    late, early = teacher.chunk(3), teacher.chunk(0)
    np.testing.assert_array_equal(plant_teacher(CONFIG, TABLE_ROWS).chunk(0).inputs.ids, early.inputs.ids)
    assert (late.inputs.ids != early.inputs.ids).mean() > 0.2


@pytest.mark.parametrize("base_rate", [0.001, 0.5, 0.97])
@pytest.mark.parametrize("logit_std", [0.0, 4.0])
def test_any_base_rate_and_spread_are_reached(base_rate, logit_std):
    config = dataclasses.replace(CONFIG, base_rate=base_rate, logit_std=logit_std)
    logits = np.concatenate([plant_teacher(config, TABLE_ROWS).chunk(i).logits for i in range(3)])
    assert expit(logits).mean() == pytest.approx(base_rate, rel=0.15)
    assert logits.std() == pytest.approx(logit_std, rel=0.05)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rows", 0),
        ("seed", -1),
        ("base_rate", 0.0),
        ("base_rate", 1.0),
        ("base_rate", float("nan")),
        ("missing_rate", 1.0),
        ("missing_rate", -0.1),
        ("min_vocabulary", 0),
        ("latent_dim", 0),
        ("logit_std", -1.0),
        ("vocabulary_scale", 1.5),
        ("zipf_exponent", float("inf")),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_written(tmp_path, option, value):
    config = dataclasses.replace(SyntheticConfig(), **{option: value})
    with pytest.raises(UserError, match=rf"data\.synthetic\.{option}={value}, expected "):
        write_raw(tmp_path / "raw.tsv", tmp_path / "logits.npy", config, TABLE_ROWS)
    assert not list(tmp_path.iterdir())


def test_a_failure_half_way_leaves_no_file(tmp_path):
    def fail(rows: int) -> None:
        if rows > CHUNK_ROWS:
            raise RuntimeError("disk gone")

    with pytest.raises(RuntimeError, match="disk gone"):
        write_raw(tmp_path / "raw.tsv", tmp_path / "logits.npy", CONFIG, TABLE_ROWS, fail)
    assert not list(tmp_path.iterdir())


@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=300),
    uniform=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50),
)
def test_guided_inversion_is_numpys_search(weights, uniform):
    cdf = np.cumsum(weights) / np.sum(weights)
    cdf[-1] = 1.0
    guide = np.searchsorted(cdf, np.arange(_GUIDE + 1) / _GUIDE, side="right")
    u = np.array([*uniform, *cdf[:-1][:20]])
    u = u[u < 1]
    ids = np.empty(len(u), np.int64)
    _invert(cdf, guide, u, np.zeros(len(u), bool), ids)
    np.testing.assert_array_equal(ids, np.searchsorted(cdf, u, side="right"))
    _invert(cdf, guide, u, np.ones(len(u), bool), ids)
    assert set(ids) == {len(cdf)}


def test_rows_of_given_options_never_change():
    """Recorded results name their data by digest: another order of draws would orphan them."""
    rows, logits = plant_teacher(CONFIG, TABLE_ROWS).raw_rows(3)
    digest = hashlib.sha256(b"".join(a.tobytes() for a in (rows.labels, rows.dense, rows.tokens))).hexdigest()
    assert digest[:16] == "62ba416c6e257cb1"
    assert len(logits) == CHUNK_ROWS
