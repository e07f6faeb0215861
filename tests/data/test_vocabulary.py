"""Contiguous ids against a plain dictionary, TorchRec's sparse_to_contiguous, and the rule at its edges."""

import dataclasses
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.datasets.criteo import BinaryCriteoUtils

from sparse2d.config import IdMapping, SplitKind, SyntheticConfig
from sparse2d.data import capacity, fit
from sparse2d.data.counting import TokenCounts
from sparse2d.data.dataset import open_dataset
from sparse2d.data.manifest import read_manifest
from sparse2d.data.prepare import prepare
from sparse2d.data.synthetic import write_raw
from sparse2d.data.verify import verify
from sparse2d.data.vocabulary import Vocabulary, VocabularyIds
from sparse2d.errors import UserError

CONTIGUOUS = {"ids": IdMapping.contiguous, "max_table_rows": 10**6}


def sparse_of(folder, day=0):
    return np.load(folder / f"day_{day}_sparse.npy")


@settings(max_examples=60)
@given(
    pieces=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=60), min_size=1, max_size=6),
    most_bytes=st.sampled_from([0, 26 * 16 * 20 + 2000, 10**9]),
    merge_entries=st.sampled_from([3, 1000]),
    at_least=st.integers(1, 4),
    order=st.randoms(),
)
def test_counts_are_a_counters_whatever_the_memory_and_the_order(
    tmp_path_factory, pieces, most_bytes, merge_entries, at_least, order
):
    counts = TokenCounts(tmp_path_factory.mktemp("runs"), most_bytes)
    starts = np.cumsum([0, *map(len, pieces)])
    everything = [token for piece in pieces for token in piece]
    for index in order.sample(range(len(pieces)), len(pieces)):
        # Spread over the token range; column 1 is missing in odd rows.
        tokens = np.array(pieces[index], np.uint32)[:, None] * np.full(26, 100_000_000, np.uint32)
        missing = np.zeros(tokens.shape, bool)
        missing[:, 1] = (starts[index] + np.arange(len(tokens))) % 2
        counts.add(tokens, missing, int(starts[index]))
    for column, seen in {0: everything, 1: everything[::2], 25: everything}.items():
        expected = [token * 100_000_000 for token, n in Counter(seen).items() if n >= at_least]
        assert counts.frequent(column, at_least, merge_entries).tolist() == [t % 2**32 for t in expected]


@pytest.mark.timeout(60)
def test_threads_that_count_at_once_lose_nothing(tmp_path):
    """A budget that all columns outgrow, so that threads write out each other's tables."""
    rng = np.random.default_rng(0)
    tokens = rng.zipf(1.2, (40_000, 26)).astype(np.uint32) % 5000 * np.arange(1, 27, dtype=np.uint32)
    missing = rng.random(tokens.shape) < 0.1
    counts = TokenCounts(tmp_path, 26 * 20 * 700)
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, len(tokens), 500)
        list(pool.map(lambda s: counts.add(tokens[s : s + 500], missing[s : s + 500], s), starts))
        found = list(pool.map(lambda column: counts.frequent(column, 3, 1000), range(26)))
    assert len(list(tmp_path.glob("run_*_tokens.bin"))) > 26
    for column in range(26):
        seen = Counter(tokens[~missing[:, column], column].tolist())
        assert found[column].tolist() == [token for token, n in seen.items() if n >= 3]


@pytest.mark.parametrize("split", [SplitKind.parts, SplitKind.last_day])
def test_workers_change_no_byte(config, tmp_path, monkeypatch, split):
    monkeypatch.setattr(fit, "TokenCounts", lambda folder: TokenCounts(folder, 26 * 20 * 100))
    raw, options = tmp_path / "raw", config(**CONTIGUOUS).synthetic
    raw.mkdir()
    for day in range(2):
        synthetic = dataclasses.replace(options, rows=9000, seed=day)
        write_raw(raw / f"day_{day}", tmp_path / "logits.npy", synthetic, config().table_rows)
    folders = [
        prepare(config(raw, **CONTIGUOUS, split=split, workers=n, out_dir=str(tmp_path / f"out_{n}")), progress=False)
        for n in (1, 2, 5)
    ]
    assert len({folder.name for folder in folders}) == 1
    assert len({read_manifest(folder).digest for folder in folders}) == 1
    assert len({(folder / "vocabulary.npz").read_bytes() for folder in folders}) == 1


def test_synthetic_tokens_are_counted_like_those_of_the_generated_text(config, tmp_path):
    options = config(**CONTIGUOUS, synthetic=SyntheticConfig(rows=3000, days=1, vocabulary_scale=0.1))
    raw = tmp_path / "rows.tsv"
    write_raw(raw, tmp_path / "logits.npy", options.synthetic, options.table_rows)
    ours, text = prepare(options, progress=False), prepare(config(raw, **CONTIGUOUS), progress=False)
    assert read_manifest(ours).digest == read_manifest(text).digest
    assert Vocabulary.load(ours).digest == Vocabulary.load(text).digest
    assert max(read_manifest(ours).columns.sparse_oov) > 0


def test_synthetic_vocabulary_is_fitted_on_the_training_days_only(config):
    synthetic = SyntheticConfig(rows=3000, days=3, vocabulary_scale=0.1)
    last = prepare(config(**CONTIGUOUS, synthetic=synthetic, split=SplitKind.last_day), progress=False)
    parts = {"train_parts": 2, "eval_parts": 1}
    assert (
        Vocabulary.load(last).digest
        == Vocabulary.load(
            prepare(config(**CONTIGUOUS, synthetic=dataclasses.replace(synthetic, days=1), **parts), progress=False)
        ).digest
    )
    rows = np.concatenate([sparse_of(last, day) for day in range(2)])
    # Row 1 (rare) aside, every table row is used in training as often as the threshold asks.
    for column in range(26):
        seen = np.bincount(rows[:, column])
        assert seen[2:].min(initial=3) >= 3


def test_memory_for_counting_is_told_and_checked(config, line, write_lines, monkeypatch):
    raw = write_lines([line(r % 2) for r in range(30)])
    options = {"workers": 1, "table_rows": [20] * 26}
    needs = capacity.estimate(30, 1, 1, [20] * 26)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": needs.memory + 1})())
    prepare(config(raw, **options), progress=False)
    with pytest.raises(UserError, match="of memory are needed"):
        prepare(config(raw, **options, ids=IdMapping.contiguous), progress=False)
    large = capacity.with_vocabulary(needs, 1000, 4 * 10**9)
    assert large.memory - needs.memory == capacity.COUNTING_BYTES * 3 // 2


def test_kept_if_seen_at_least_t_times(config, line, write_lines):
    """Tokens seen T - 1, T and T + 1 times in the training rows; the other half does not count."""
    tokens = ["a"] * 2 + ["b"] * 3 + ["c"] * 4
    training = [line(r % 2, {"C5": token}) for r, token in enumerate(tokens)]
    evaluation = [line(r % 2, {"C5": token}) for r, token in enumerate(["a"] * 8 + ["c"])]
    raw = write_lines(training + evaluation)
    folder = prepare(config(raw, **CONTIGUOUS, min_count=3, train_parts=1, eval_parts=1), progress=False)
    assert sparse_of(folder)[:, 4].tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 3, *[1] * 8, 3]
    manifest = read_manifest(folder)
    assert manifest.columns.sparse_oov[4] == 10
    assert manifest.num_embeddings[4] == 4
    assert open_dataset(folder).num_embeddings[4] == 4


def test_null_rare_and_unseen_are_told_apart_from_neighbours(config, line, write_lines):
    raw = write_lines([line(r % 2, {"C1": t}) for r, t in enumerate(["", "7", "7", "8", "", "9", "7", "ffffffff"])])
    folder = prepare(config(raw, **CONTIGUOUS, min_count=2, train_parts=5, eval_parts=3), progress=False)
    assert sparse_of(folder)[:, 0].tolist() == [0, 2, 2, 1, 0, 1, 2, 1]
    columns = read_manifest(folder).columns
    assert (columns.sparse_missing[0], columns.sparse_oov[0], columns.sparse_distinct[0]) == (2, 3, 3)


def test_equals_torchrecs_contiguous_ids(config, line, tmp_path, monkeypatch):
    """Without missing values, over two days, every id is TorchRec's."""
    rng = np.random.default_rng(1)
    tokens = rng.zipf(1.3, (400, 26)) % 2**31
    folder = tmp_path / "raw"
    folder.mkdir()
    for day in range(3):
        rows = tokens[200 * day : 200 * day + 200] if day < 2 else tokens[:50]
        lines = [line(r % 2, {f"C{c + 1}": f"{t:x}" for c, t in enumerate(row)}) for r, row in enumerate(rows)]
        (folder / f"day_{day}").write_text("".join(f"{text}\n" for text in lines))
    ours = prepare(config(folder, **CONTIGUOUS, min_count=3, split=SplitKind.last_day), progress=False)
    for day in range(2):
        np.save(tmp_path / f"theirs_{day}.npy", tokens[200 * day : 200 * day + 200])
    names = [str(tmp_path / f"theirs_{day}.npy") for day in range(2)]
    BinaryCriteoUtils.sparse_to_contiguous(names, str(tmp_path), frequency_threshold=3)
    for day in range(2):
        theirs = np.load(tmp_path / f"theirs_{day}_contig_freq.npy")
        np.testing.assert_array_equal(sparse_of(ours, day), theirs)


def test_saved_vocabulary_reproduces_every_id_and_serves_another_day(config, line, write_lines):
    rows = [line(r % 2, {"C3": f"{r % 5:x}", "C4": ""}) for r in range(40)]
    first = prepare(config(write_lines(rows), **CONTIGUOUS), progress=False)
    vocabulary = Vocabulary.load(first)
    ids, _ = VocabularyIds(vocabulary, 1, 100)(
        np.full((5, 26), np.arange(5)[:, None], np.uint32), np.zeros((5, 26), bool)
    )
    assert ids[:, 2].tolist() == sparse_of(first)[:5, 2].tolist() == [2, 3, 4, 5, 6]
    other = write_lines([line(r % 2, {"C3": f"{r:x}"}) for r in range(20)], "day_1")
    second = prepare(config(other, **CONTIGUOUS, vocabulary=str(first)), progress=False)
    assert sparse_of(second)[:, 2].tolist() == [2, 3, 4, 5, 6, *[1] * 15]
    again = prepare(config(write_lines(rows, "same.tsv"), **CONTIGUOUS, vocabulary=str(first)), progress=False)
    np.testing.assert_array_equal(sparse_of(again), sparse_of(first))


def test_vocabulary_that_outgrows_its_table_is_refused(config, line, write_lines):
    raw = write_lines([line(r % 2, {"C3": f"{r:x}"}) for r in range(30)])
    options = {"ids": IdMapping.contiguous, "min_count": 1, "max_table_rows": 20}
    with pytest.raises(UserError, match=r"vocabulary of C3 needs 27 table rows, data\.max_table_rows=20; raise it"):
        prepare(config(raw, **options), progress=False)


@pytest.mark.parametrize("content", [b"", b"junk", None])
def test_damaged_vocabulary_is_refused(config, line, write_lines, tmp_path, content):
    raw, file = write_lines([line(r % 2) for r in range(30)]), tmp_path / "vocabulary.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match="vocabulary"):
        prepare(config(raw, **CONTIGUOUS, vocabulary=str(file)), progress=False)


def damaged(change):
    """The damage that ``change`` does to a vocabulary's arrays, by name."""

    def damage(file):
        with np.load(file) as arrays:
            content = dict(arrays)
        change(content)
        np.savez(file, **content)

    return damage


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (lambda file: file.unlink(), [r"missing; without it no other day"]),
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), [r"not a vocabulary"]),
        (lambda file: file.write_bytes(b""), [r"not a vocabulary"]),
        (damaged(lambda c: c.update(C3=c["C3"][::-1])), [r"digest \w+\.\.\., expected \w+"]),
        (damaged(lambda c: c.update(C3=c["C3"][:-1])), [r"digest \w+"]),
        (
            damaged(lambda c: c.update(C3=np.append(c["C3"], np.uint32(77)))),
            [r"digest \w+", r"C3 has 6 tokens, expected 5 at most, for 7 table rows"],
        ),
        (damaged(lambda c: c.update(C3=c["C3"].astype(np.int64))), ["not 32-bit tokens"]),
        (damaged(lambda c: c.pop("C26")), ["not a vocabulary"]),
    ],
)
def test_check_says_what_is_wrong_with_the_vocabulary(config, line, write_lines, damage, messages):
    raw = write_lines([line(r % 2, {"C3": f"{r % 5:x}"}) for r in range(40)])
    folder = prepare(config(raw, **CONTIGUOUS), progress=False)
    assert verify(folder) == []
    damage(folder / "vocabulary.npz")
    faults = verify(folder)
    assert len(faults) == len(messages)
    for fault, message in zip(faults, messages, strict=True):
        assert re.search(rf"vocabulary\.npz: .*{message}", fault)
    with pytest.raises(UserError, match=r"vocabulary"):
        prepare(config(raw, name="other", **CONTIGUOUS, vocabulary=str(folder)), progress=False)


def test_check_of_hashed_ids_asks_for_no_vocabulary(config, line, write_lines):
    folder = prepare(config(write_lines([line(r % 2) for r in range(30)])), progress=False)
    assert verify(folder) == []
    assert not (folder / "vocabulary.npz").exists()
