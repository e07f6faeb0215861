"""Compressed collectives of lookups on real ranks, against the reference on the tensors of all ranks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lookup_ranks import Exchange, Exchanged, exchange_all
from torch import Tensor

from sparse2d.compression.reference import dct_mp
from sparse2d.compression.threshold import density_at
from sparse2d.config import LookupCompressionConfig, LookupMethod, ValueDtype
from sparse2d.launch import run_ranks

NUM_RANKS = 3
STEPS = 5
# Steps 1, 3 and 5 find thresholds.
DCT = LookupCompressionConfig(method=LookupMethod.dct, density=0.1, lifetime=2)
# One rank holds no table, and tables are of several dims.
TABLE_WISE = [[8, 4], [], [16]]
ROW_WISE = [[8, 12]] * NUM_RANKS
BATCHES = {"equal": [10] * NUM_RANKS, "unequal": [7, 12, 0]}


def exchange(dims: list[list[int]], row_wise: bool, batch: list[int], **options) -> Exchange:
    random = np.random.default_rng(0)

    def normal(rows: int, columns: int, zeros: float) -> np.ndarray:
        values = random.normal(size=(rows, columns)) * (random.random((rows, 1)) >= zeros)
        return values.astype(np.float32)

    width = sum(dims[0]) if row_wise else sum(map(sum, dims))
    config = LookupCompressionConfig(**{**vars(DCT), **options})
    # Of partial sums most are zero: of samples without rows on the rank.
    pooled = [[normal(sum(batch), sum(of), 0.6 * row_wise) for of in dims] for _ in range(STEPS)]
    factors = [[normal(rows, width, 0) for rows in batch] for _ in range(STEPS)]
    return Exchange(config, dims, row_wise, batch, pooled, factors, [False] * STEPS)


CASES = {
    f"{layout}, {sizes}": exchange(dims, layout == "row_wise", batch)
    for layout, dims in (("table_wise", TABLE_WISE), ("row_wise", ROW_WISE))
    for sizes, batch in BATCHES.items()
}
CASES["bf16"] = exchange(TABLE_WISE, False, BATCHES["equal"], value_dtype=ValueDtype.bf16)
CASES["fp16"] = exchange(ROW_WISE, True, BATCHES["equal"], value_dtype=ValueDtype.fp16)
CASES["warmup"] = exchange(TABLE_WISE, False, BATCHES["equal"], warmup_steps=4, density=0.05)
CASES["density 1"] = exchange(ROW_WISE, True, BATCHES["equal"], density=1.0)
CASES["not finite"] = exchange(TABLE_WISE, False, BATCHES["equal"])
CASES["not finite"].pooled[1][0][4, 3], CASES["not finite"].pooled[1][2][5, 0] = np.nan, np.inf
CASES["evaluation"] = exchange(TABLE_WISE, False, BATCHES["equal"])
CASES["evaluation"].evaluated[2] = True
CASES["again"] = CASES["table_wise, equal"]


@pytest.fixture(scope="module")
def results() -> dict[str, Exchanged]:
    return dict(zip(CASES, run_ranks(exchange_all, list(CASES.values()), num_ranks=NUM_RANKS), strict=True))


def tensors(arrays: list[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@dataclass
class Expected:
    arrived: list[list[Tensor]]
    gradients: list[list[Tensor]]
    masks: list[list[Tensor]]


def expected(case: Exchange) -> Expected:
    """The reference, table by table, with thresholds from NumPy's sort."""
    taus: dict[tuple[int, int], Tensor] = {}
    steps = Expected([], [], [])
    for step in range(1, STEPS + 1):
        pooled, factors = tensors(case.pooled[step - 1]), tensors(case.factors[step - 1])
        tables = [list(of.split(dims, dim=1)) for of, dims in zip(pooled, case.dims, strict=True)]
        density = density_at(step, case.config)
        if (step - 1) % case.config.lifetime == 0 or step <= case.config.warmup_steps:
            for rank, of_rank in enumerate(tables):
                for table, values in enumerate(of_rank):
                    magnitudes = np.sort(np.abs(values.numpy()).flatten())
                    tau = magnitudes[-max(1, round(density * len(magnitudes)))]
                    # Zeros are sent at density 1 only.
                    taus[rank, table] = torch.tensor(0.0 if density == 1 else max(tau, np.float32(2.0**-149)))
        gradient = torch.cat(factors)
        width = 0
        arrived, masks, gradients = [], [[] for _ in tables], [[] for _ in tables]
        # Row-wise, all ranks hold parts of every table; else every table is on one rank.
        places = (
            [[(rank, table) for rank in range(NUM_RANKS)] for table in range(len(tables[0]))]
            if case.row_wise
            else [[(rank, table)] for rank, of_rank in enumerate(tables) for table in range(len(of_rank))]
        )
        for holders in places:
            parts = [tables[rank][table] for rank, table in holders]
            columns = gradient[:, width : width + parts[0].shape[1]]
            width += parts[0].shape[1]
            values, of_masks, of_gradients = dct_mp(parts, [taus[place] for place in holders], columns)
            arrived.append(values)
            for (rank, _), mask, back in zip(holders, of_masks, of_gradients, strict=True):
                masks[rank].append(mask)
                # TorchRec's lookups divide by the ranks of the group.
                gradients[rank].append(back / NUM_RANKS)
        empty = torch.empty(sum(case.batch), 0)
        steps.arrived.append(list(torch.cat(arrived, dim=1).split(case.batch)))
        steps.masks.append([torch.cat([empty.bool(), *of], dim=1) for of in masks])
        steps.gradients.append([torch.cat([empty, *of], dim=1) for of in gradients])
    return steps


@pytest.mark.parametrize("name", [*(f"{a}, {b}" for a in ("table_wise", "row_wise") for b in BATCHES), "warmup"])
def test_entries_arrive_and_their_gradients_come_back_as_in_the_reference(results, name):
    reference, result = expected(CASES[name]), results[name]
    for step in range(STEPS):
        for rank in range(NUM_RANKS):
            torch.testing.assert_close(result.arrived[step][rank], reference.arrived[step][rank])
            torch.testing.assert_close(result.gradients[step][rank], reference.gradients[step][rank])
    shares = [torch.cat([mask.flatten() for mask in masks]).float().mean() for masks in reference.masks]
    assert 0 < shares[-1] < 0.15


def test_at_density_one_everything_arrives_and_every_gradient_comes_back(results):
    case, result = CASES["density 1"], results["density 1"]
    for step in range(STEPS):
        sums = torch.stack(tensors(case.pooled[step])).sum(dim=0).split(case.batch)
        gradient = torch.cat(tensors(case.factors[step])) / NUM_RANKS
        for rank in range(NUM_RANKS):
            torch.testing.assert_close(result.arrived[step][rank], sums[rank], rtol=0, atol=1e-6)
            torch.testing.assert_close(result.gradients[step][rank], gradient, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_values_and_gradients_are_rounded_once_and_sums_are_not(results, name, dtype):
    case, result, reference = CASES[name], results[name], expected(CASES[name])
    for step in range(STEPS):
        rounded = [of * mask for of, mask in zip(tensors(case.pooled[step]), reference.masks[step], strict=True)]
        rounded = [of.to(dtype).float() for of in rounded]
        arrived = torch.stack(rounded).sum(dim=0) if case.row_wise else torch.cat(rounded, dim=1)
        torch.testing.assert_close(torch.cat(result.arrived[step]), arrived)
        gradient = torch.cat(tensors(case.factors[step])).to(dtype).float() / NUM_RANKS
        columns = [gradient] * NUM_RANKS if case.row_wise else gradient.split([sum(of) for of in case.dims], dim=1)
        for rank, mask in enumerate(reference.masks[step]):
            torch.testing.assert_close(result.gradients[step][rank], columns[rank] * mask)


def test_what_is_not_finite_arrives(results):
    arrived = torch.cat(results["not finite"].arrived[1])
    assert arrived[4, 3].isnan()
    assert arrived[5, 12] == torch.inf
    assert (~arrived.isfinite()).sum() == 2
    # It is not remembered.
    assert torch.cat(results["not finite"].arrived[2]).isfinite().all()


def test_an_evaluation_between_steps_leaves_no_trace(results):
    """In step 3, which would find new thresholds; the next step finds them, one step late."""
    plain, evaluated = results["table_wise, equal"], results["evaluation"]
    assert list(evaluated.gradients[2]) == [None] * NUM_RANKS
    case = CASES["table_wise, equal"]
    # Thresholds of step 1 are still in force.
    old = np.sort(np.abs(case.pooled[0][2]).flatten())[-round(0.1 * case.pooled[0][2].size)]
    values = torch.from_numpy(case.pooled[2][2])
    sent = torch.cat(evaluated.arrived[2])[:, 12:]
    assert sent.equal(values * (values.abs() >= float(old)))
    assert not sent.equal(torch.cat(plain.arrived[2])[:, 12:])


def test_the_same_twice(results):
    once, again = results["table_wise, equal"], results["again"]
    for one, other in zip(once.arrived + once.gradients, again.arrived + again.gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert once.sent == again.sent


@pytest.mark.parametrize(("name", "value_bytes"), [("table_wise, unequal", 4), ("row_wise, equal", 4), ("bf16", 2)])
def test_bytes_on_the_wire_are_those_of_the_format(results, name, value_bytes):
    """For each other rank: one flag bit for eight entries, their byte if one of them is sent, and the values."""
    case, result, reference = CASES[name], results[name], expected(CASES[name])
    for step in range(STEPS):
        entries = [mask.split(case.batch) for mask in reference.masks[step]]
        for rank in range(NUM_RANKS):
            others = [peer for peer in range(NUM_RANKS) if peer != rank]
            masks = [entries[rank][peer].numpy().flatten() for peer in others]
            positions = sum(-(-len(mask) // 64) + np.count_nonzero(np.packbits(mask)) for mask in masks)
            there = sum(int(mask.sum()) for mask in masks) * value_bytes
            back = sum(int(entries[peer][rank].sum()) for peer in others) * value_bytes
            sent = result.sent[step][rank]
            assert sent == {"sizes": 8 * len(others), "embeddings": positions + there, "gradients": back}
