"""Masks as bytes, against NumPy's packing and by what comes back."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sparse2d.compression.bitmap import (
    BLOCK,
    blocks,
    pack_bits,
    pad_chunks,
    squeeze,
    unpack_bits,
    unpad_chunks,
    unsqueeze,
)

MASKS = st.integers(0, 12).flatmap(lambda n: npst.arrays(bool, n * BLOCK))


@given(MASKS)
@example(np.zeros(0, bool))
@example(np.ones(BLOCK, bool))
def test_bits_are_numpys_and_come_back(mask):
    packed = pack_bits(torch.tensor(mask))
    assert packed.tolist() == np.packbits(mask, bitorder="little").tolist()
    assert unpack_bits(packed).tolist() == mask.tolist()


@given(MASKS)
def test_zero_bytes_are_left_out_and_come_back(mask):
    packed = pack_bits(torch.tensor(mask))
    flags, kept = squeeze(packed)
    assert len(flags) == blocks(len(mask))
    assert 0 not in kept.tolist()
    assert unsqueeze(flags, kept).tolist() == packed.tolist()


@given(st.lists(st.integers(0, 200), max_size=5), st.integers(0, 2**32 - 1))
def test_chunks_are_filled_up_to_blocks_of_entries_that_are_not_set(lengths, seed):
    mask = torch.from_numpy(np.random.default_rng(seed).random(sum(lengths)) < 0.5)
    padded = pad_chunks(mask, lengths)
    assert len(padded) == sum(BLOCK * blocks(length) for length in lengths)
    assert padded.sum() == mask.sum()
    assert unpad_chunks(padded, lengths).tolist() == mask.tolist()


@pytest.mark.parametrize("share", [0.25, 0.05, 0.02])
def test_a_mask_takes_the_bits_that_the_formula_says(share):
    mask = torch.from_numpy(np.random.default_rng(0).random(64 * 4000) < share)
    flags, kept = squeeze(pack_bits(mask))
    bits = 8 * (len(flags) + len(kept)) / len(mask)
    assert bits == pytest.approx(1 / 8 + 1 - (1 - share) ** 8, rel=0.02)
