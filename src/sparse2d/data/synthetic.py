"""Raw Criteo files drawn from a planted teacher, so that a machine without any data runs the same path.

The teacher is additive: ``logit = bias + scale * (sum_f <u_f, e_f[id]> + sum_j w_j * dense_feature_j)``. (A teacher
made of pairwise products would need long training to leave its saddle points.) It sees what a model sees: dense values
after ``criteo.dense_features``, where a missing value is a 0, and ids, where a missing one has no effect.

Ids follow a power law truncated at each feature's vocabulary; dense values are heavy-tailed counts, negative only in
I2, as in the real log.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import entr, expit

from sparse2d.config import NUM_DENSE, NUM_SPARSE, SyntheticConfig
from sparse2d.data.atomic import replacing
from sparse2d.data.criteo import RawRows, dense_features
from sparse2d.errors import UserError

# Part of every generated file's name: raise it when the same options would give other rows.
GENERATOR_VERSION = 1

CHUNK_ROWS = 8192
_CALIBRATION_ROWS = 65_536
# Children of the seed: one stream for each use, so that none of them moves another.
_TEACHER, _CALIBRATION, _CHUNKS = range(3)
_TOKENS = 2**32
# Parts of [0, 1) that know where their ids lie. A power of two, so that the part of a number is exact.
_GUIDE = 4096
# Shares of the real log's I2.
_I2, _MINUS_ONE, _MINUS_TWO = 1, 0.1, 0.0007


@dataclass(frozen=True)
class Inputs:
    """Rows as the teacher sees them: ``dense`` int64 [n, 13] under a mask of missing values, ``ids`` int64 [n, 26].

    An id is a rank in its feature's vocabulary, 0 the most frequent; the vocabulary's size stands for a missing value.
    """

    dense: NDArray[np.int64]
    dense_missing: NDArray[np.bool_]
    ids: NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """Labelled rows with the teacher's logits: ``labels`` bool [n], ``logits`` float64 [n]."""

    inputs: Inputs
    labels: NDArray[np.bool_]
    logits: NDArray[np.float64]


@dataclass(frozen=True)
class Teacher:
    """What decides every row; each feature's last entry of ``effects`` and ``tokens`` stands for a missing value."""

    config: SyntheticConfig
    cumulative: list[NDArray[np.float64]]
    effects: list[NDArray[np.float64]]
    tokens: list[NDArray[np.uint32]]
    dense_log_mean: NDArray[np.float64]
    dense_log_std: NDArray[np.float64]
    dense_weights: NDArray[np.float64]
    guides: list[NDArray[np.int64]]
    scale: float = 1.0
    bias: float = 0.0

    def inputs(self, rng: np.random.Generator, rows: int) -> Inputs:
        """Draw ``rows`` unlabelled rows."""
        counts = np.exp(rng.normal(self.dense_log_mean, self.dense_log_std, (rows, NUM_DENSE)))
        dense = counts.astype(np.int64)
        low = rng.random(rows)
        dense[low < _MINUS_ONE, _I2] = -1
        dense[low < _MINUS_TWO, _I2] = -2
        dense_missing = rng.random((rows, NUM_DENSE)) < self.config.missing_rate
        uniform = rng.random((NUM_SPARSE, rows))
        missing = rng.random((NUM_SPARSE, rows)) < self.config.missing_rate
        # Feature by feature in memory: that is how they are drawn, and how effects and tokens are looked up.
        ids = np.empty(uniform.shape, np.int64)
        for feature, (cdf, guide) in enumerate(zip(self.cumulative, self.guides, strict=True)):
            _invert(cdf, guide, uniform[feature], missing[feature], ids[feature])
        return Inputs(dense, dense_missing, ids.T)

    def logits(self, inputs: Inputs) -> NDArray[np.float64]:
        """The teacher's logit of each row, float64 [n]."""
        dense = dense_features(inputs.dense, inputs.dense_missing).astype(np.float64)
        logits = (dense * self.dense_weights).sum(axis=1)
        for effect, ids in zip(self.effects, inputs.ids.T, strict=True):
            logits += effect[ids]
        return np.asarray(self.bias + self.scale * logits)

    def chunk(self, index: int) -> Chunk:
        """Rows ``[index * CHUNK_ROWS, (index + 1) * CHUNK_ROWS)``, the same however many rows are asked for in all."""
        rng = _stream(self.config.seed, _CHUNKS, index)
        inputs = self.inputs(rng, CHUNK_ROWS)
        logits = self.logits(inputs)
        return Chunk(inputs, rng.random(CHUNK_ROWS) < expit(logits), logits)

    def raw_rows(self, index: int) -> tuple[RawRows, NDArray[np.float64]]:
        """The same rows as a parser would read them, and the teacher's logits."""
        chunk = self.chunk(index)
        ids = chunk.inputs.ids
        tokens = np.stack([values[column] for values, column in zip(self.tokens, ids.T, strict=True)], axis=1)
        missing = ids == np.array([len(cdf) for cdf in self.cumulative])
        dense = np.where(chunk.inputs.dense_missing, 0, chunk.inputs.dense)
        labels = chunk.labels.astype(np.int32)
        return RawRows(labels, dense, chunk.inputs.dense_missing, tokens, missing), chunk.logits


def vocabulary_sizes(config: SyntheticConfig, table_rows: Sequence[int]) -> list[int]:
    """Distinct tokens of each feature: the table's rows times ``vocabulary_scale``, at least ``min_vocabulary``."""
    return [max(config.min_vocabulary, round(rows * config.vocabulary_scale)) for rows in table_rows]


def plant_teacher(config: SyntheticConfig, table_rows: Sequence[int]) -> Teacher:
    """Draw the teacher, then fix its scale (std of the logits) and bias (base rate) on a sample of rows.

    Raises:
        UserError: if an option is out of its range.
    """
    _check(config)
    rng = _stream(config.seed, _TEACHER)
    sizes = vocabulary_sizes(config, table_rows)
    cumulative = [_power_law_cdf(size, config.zipf_exponent) for size in sizes]
    tokens = [_tokens(rng, size, rows) for size, rows in zip(sizes, table_rows, strict=True)]
    log_mean, log_std = rng.uniform(0.0, 5.0, NUM_DENSE), rng.uniform(0.7, 1.7, NUM_DENSE)
    effects = [_effects(rng, size, config.latent_dim) for size in sizes]
    weights = rng.normal(size=NUM_DENSE) / log_std
    guides = [np.searchsorted(cdf, np.arange(_GUIDE + 1) / _GUIDE, side="right") for cdf in cumulative]
    parts = (config, cumulative, effects, tokens, log_mean, log_std, weights, guides)

    unscaled = Teacher(*parts)
    logits = unscaled.logits(unscaled.inputs(_stream(config.seed, _CALIBRATION), _CALIBRATION_ROWS))
    scale = config.logit_std / logits.std()
    logits = scale * logits
    reach = float(np.abs(logits).max()) + abs(math.log(config.base_rate / (1 - config.base_rate))) + 1.0
    bias = brentq(lambda b: expit(logits + b).mean() - config.base_rate, -reach, reach)
    return Teacher(*parts, scale=float(scale), bias=float(bias))


def write_raw(
    path: Path,
    logits_path: Path,
    config: SyntheticConfig,
    table_rows: Sequence[int],
    on_rows: Callable[[int], object] | None = None,
) -> None:
    """Write ``config.rows`` raw rows, and the teacher's logit of each as a float64 .npy file.

    Both get their names only when complete, the raw file last. ``on_rows`` hears the number of rows written so far.

    Raises:
        UserError: if an option is out of its range.
    """
    teacher = plant_teacher(config, table_rows)
    logits = np.empty(config.rows)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            for start in range(0, config.rows, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, config.rows)
                rows, chunk_logits = teacher.raw_rows(start // CHUNK_ROWS)
                logits[start:stop] = chunk_logits[: stop - start]
                file.writelines(_lines(rows)[: stop - start])
                if on_rows is not None:
                    on_rows(stop)
        with replacing(logits_path) as temporary_logits, temporary_logits.open("wb") as file:
            np.save(file, logits)


@dataclass
class TeacherSums:
    """What the teacher's log loss and NE on some rows follow from, in the memory of three numbers."""

    rows: int = 0
    positives: int = 0
    loss: float = 0.0

    def add(self, logits: NDArray[np.float64], labels: NDArray[np.int32]) -> None:
        """Add rows: float64 [n] and 0 or 1 [n]."""
        self.rows += len(labels)
        self.positives += int(labels.sum())
        self.loss += float(np.sum(np.logaddexp(0.0, logits) - labels * logits))

    def values(self) -> tuple[int, int, float]:
        """Rows, positives and summed loss, to be added up over days."""
        return self.rows, self.positives, self.loss

    def figures(self) -> dict[str, float | None]:
        """Log loss and NE, the best that a model can reach in expectation.

        NE is the log loss over the entropy of these rows' base rate; null where all labels are the same.
        """
        base_rate = self.positives / self.rows
        entropy = float(entr(base_rate) + entr(1.0 - base_rate))
        return {"logloss": self.loss / self.rows, "ne": self.loss / self.rows / entropy if entropy > 0 else None}


def teacher_figures(logits: NDArray[np.float64], labels: NDArray[np.int32]) -> dict[str, float | None]:
    """``TeacherSums.figures`` of rows at hand."""
    sums = TeacherSums()
    sums.add(logits, labels)
    return sums.figures()


def _check(config: SyntheticConfig) -> None:
    checks = {
        "rows": (config.rows >= 1, "at least 1"),
        "days": (1 <= config.days <= config.rows, "at least 1, and no more than the rows"),
        "seed": (config.seed >= 0, "at least 0"),
        "base_rate": (0 < config.base_rate < 1, "between 0 and 1, both excluded"),
        "zipf_exponent": (0 <= config.zipf_exponent < math.inf, "at least 0"),
        "vocabulary_scale": (0 <= config.vocabulary_scale <= 1, "0 to 1"),
        "min_vocabulary": (config.min_vocabulary >= 1, "at least 1"),
        "latent_dim": (config.latent_dim >= 1, "at least 1"),
        "logit_std": (0 <= config.logit_std < math.inf, "at least 0"),
        "missing_rate": (0 <= config.missing_rate < 1, "0 to 1, 1 excluded"),
    }
    for name, (holds, expected) in checks.items():
        if not holds:
            raise UserError(f"data.synthetic.{name}={getattr(config, name)}, expected {expected}")


def _stream(seed: int, *use: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=use))


def _power_law_cdf(size: int, exponent: float) -> NDArray[np.float64]:
    cumulative = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    return np.asarray(cumulative / cumulative[-1])


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _invert(
    cdf: NDArray[np.float64],
    guide: NDArray[np.int64],
    uniform: NDArray[np.float64],
    missing: NDArray[np.bool_],
    ids: NDArray[np.int64],
) -> None:
    """``np.searchsorted(cdf, uniform, side="right")``, from the part of the table that ``guide`` tells."""
    for row in range(len(uniform)):
        if missing[row]:
            ids[row] = len(cdf)
            continue
        u = uniform[row]
        part = int(u * _GUIDE)
        low, high = guide[part], guide[part + 1]
        while low < high:
            middle = (low + high) >> 1
            if cdf[middle] <= u:
                low = middle + 1
            else:
                high = middle
        ids[row] = low


def _effects(rng: np.random.Generator, size: int, latent_dim: int) -> NDArray[np.float64]:
    """<u, e[id]> for each id of one feature, with unit variance over ids; 0 for the missing value."""
    direction = rng.normal(size=latent_dim)
    embeddings = rng.normal(size=(size, latent_dim))
    return np.append(embeddings @ direction / np.linalg.norm(direction), 0.0)


def _tokens(rng: np.random.Generator, size: int, rows: int) -> NDArray[np.uint32]:
    """Distinct tokens of one feature, and a 0 for the missing value.

    Where they fit, they stay distinct modulo the table's rows and off the missing value's row 0: else a model could not
    tell apart what the teacher can, and the teacher's NE would be out of reach.
    """
    if size < rows:
        residues = 1 + rng.choice(rows - 1, size, replace=False)
        values = residues + rows * rng.integers(0, (_TOKENS - 1 - residues) // rows, endpoint=True)
    else:
        values = rng.choice(_TOKENS, size, replace=False)
    return np.append(values, 0).astype(np.uint32)


def _lines(rows: RawRows) -> list[bytes]:
    dense = rows.dense.astype(object)
    dense[rows.dense_missing] = ""
    tokens = np.array([f"{token:08x}" for token in rows.tokens.flat], dtype=object).reshape(rows.tokens.shape)
    tokens[rows.tokens_missing] = ""
    columns = [rows.labels.tolist(), *dense.T.tolist(), *tokens.T.tolist()]
    return [b"%s\n" % "\t".join(map(str, row)).encode() for row in zip(*columns, strict=True)]
