"""The vocabulary of ``ids=contiguous``: which tokens have a table row of their own, and which one.

Row 0 is a missing value, row 1 any token that is not in the vocabulary (rare or unseen), and from row 2 on come the
tokens that are seen at least T times in the rows it was fitted on, in the order in which they are first seen there.
(TorchRec's ``sparse_to_contiguous`` numbers them equally, but takes a missing value for the token 0.)
"""

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_SPARSE
from sparse2d.data.atomic import replacing
from sparse2d.data.criteo import FEATURE_NAMES
from sparse2d.data.hashtable import empty_slots, slot_of
from sparse2d.data.manifest import MANIFEST, read_manifest
from sparse2d.errors import UserError

NULL, OUT_OF_VOCABULARY, FIRST = 0, 1, 2
VOCABULARY = "vocabulary.npz"


class Vocabulary:
    """For each feature, the tokens with a row of their own: uint32, the first one's being row 2."""

    def __init__(self, tokens: Sequence[NDArray[np.uint32]]) -> None:
        self.tokens = list(tokens)

    @property
    def digest(self) -> str:
        """The sha256 of all tokens in their order."""
        digest = hashlib.sha256()
        for tokens in self.tokens:
            digest.update(len(tokens).to_bytes(8, "little") + tokens.astype("<u4").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write one array for each feature, C1 to C26; the file is whole or absent."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            arrays: dict[str, Any] = dict(zip(FEATURE_NAMES, self.tokens, strict=True))
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read a vocabulary from its file, or from the folder of a dataset that was made with it.

        Raises:
            UserError: if there is none, or it is damaged.
        """
        file = path / VOCABULARY if path.is_dir() else path
        try:
            with np.load(file, allow_pickle=False) as arrays:
                tokens = [arrays[name] for name in FEATURE_NAMES]
        except FileNotFoundError as error:
            raise UserError(f"data.vocabulary={path}: no {VOCABULARY} there; fit one, or give another") from error
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
            raise UserError(f"{file}: not a vocabulary ({error}); fit it again") from error
        if any(array.dtype != np.uint32 or array.ndim != 1 for array in tokens):
            raise UserError(f"{file}: not a vocabulary (not 32-bit tokens); fit it again")
        vocabulary = cls(tokens)
        if file != path and (path / MANIFEST).is_file():
            expected = read_manifest(path).mappings.get("vocabulary")
            if vocabulary.digest != expected:
                raise UserError(f"{file}: not the vocabulary that this dataset was made with; prepare it again")
        return vocabulary


class VocabularyIds:
    """The id mapping of a vocabulary (see ``ids.IdMap``)."""

    def __init__(self, vocabulary: Vocabulary, min_table_rows: int, max_table_rows: int) -> None:
        self.num_embeddings = [max(len(tokens) + FIRST, min_table_rows) for tokens in vocabulary.tokens]
        for feature, rows in zip(FEATURE_NAMES, self.num_embeddings, strict=True):
            if rows > max_table_rows:
                raise UserError(
                    f"the vocabulary of {feature} needs {rows} table rows, data.max_table_rows={max_table_rows}; "
                    "raise it, or data.min_count"
                )
        self.name = "row of the token's vocabulary; missing = row 0, out of vocabulary = row 1"
        self.digest = vocabulary.digest
        self._tables = [_lookup_table(tokens) for tokens in vocabulary.tokens]

    def __call__(
        self, tokens: NDArray[np.uint32], missing: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See ``IdMap``."""
        ids = np.empty(tokens.shape, np.int32)
        oov = np.zeros(NUM_SPARSE, np.int64)
        for column, (keys, rows) in enumerate(self._tables):
            oov[column] = _look_up(tokens, missing, column, keys, rows, ids)
        return ids, oov


def _lookup_table(tokens: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    keys, rows = empty_slots(2 * len(tokens)), empty_slots(2 * len(tokens)).astype(np.int32)
    _insert(tokens, keys, rows)
    return keys, rows


@numba.njit(cache=True, nogil=True)
def _insert(tokens: NDArray[np.uint32], keys: NDArray[np.uint32], rows: NDArray[np.int32]) -> None:
    for place in range(len(tokens)):
        slot = slot_of(tokens[place], keys, rows)
        keys[slot] = tokens[place]
        rows[slot] = FIRST + place


@numba.njit(cache=True, nogil=True)
def _look_up(
    tokens: NDArray[np.uint32],
    missing: NDArray[np.bool_],
    column: int,
    keys: NDArray[np.uint32],
    rows: NDArray[np.int32],
    ids: NDArray[np.int32],
) -> int:
    """Fill one column of ``ids``; return how many tokens are out of vocabulary."""
    oov = 0
    for row in range(len(tokens)):
        if missing[row, column]:
            ids[row, column] = NULL
            continue
        found = rows[slot_of(tokens[row, column], keys, rows)]
        if found == 0:
            oov += 1
            found = OUT_OF_VOCABULARY
        ids[row, column] = found
    return oov
