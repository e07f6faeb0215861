"""Calibration finds planted constants; the published points come out as the reports claim."""

from dataclasses import replace

import pytest

from sparse2d.cost import calibrate as calibration
from sparse2d.cost.calibrate import at, fit, fit_points
from sparse2d.cost.config import FREE
from sparse2d.cost.model import predict
from sparse2d.cost.paper import published
from sparse2d.cost.validate import Case, cases, evaluate
from sparse2d.cost.workload import make_workload
from sparse2d.errors import UserError


@pytest.fixture(scope="module")
def exfm(simulate_config):
    return simulate_config("workload=exfm_like", "hardware=h100_8x400g", "constants=exfm")


def test_a_fit_finds_planted_constants(exfm):
    tables = make_workload(exfm.workload)
    # As in the published points, exchanges are hidden on 256 GPUs: else dense part and overlap cannot be told apart.
    planted = replace(exfm.constants, dense_efficiency=0.4, alltoall_efficiency=0.5, overlap_share=0.5)
    points = [replace(p, qps=predict(at(exfm, p.num_gpus, 1, planted), tables).qps) for p in fit_points(exfm)]
    found = fit(exfm, tables, points)
    for name in FREE:
        assert getattr(found.constants, name) == pytest.approx(getattr(planted, name), rel=1e-3)
    assert found.free == list(FREE)
    assert found.constants.fitted_on == ["exfm 256 1", "exfm 512 1", "exfm 1024 1"]


@pytest.mark.parametrize(("experiment", "free"), [("exfm_scaling", 3), ("ctr_table", 1)])
def test_the_stored_constants_are_what_calibrate_finds(experiment, free, simulate_config):
    config = simulate_config(f"experiment={experiment}")
    found = fit(config, make_workload(config.workload), fit_points(config))
    assert len(found.free) == free
    assert found.constants.fitted_on == config.constants.fitted_on
    for name in FREE:
        assert getattr(found.constants, name) == pytest.approx(getattr(config.constants, name), abs=2e-4)
        assert not found.at_bound(name)


def test_only_full_model_parallelism_is_fitted_and_the_2d_points_follow(exfm):
    fitted, rows = evaluate(Case("as assumed", exfm, {}))
    assert {point.parallelism for point in fitted.points} == {"full_mp"}
    tested = [row for row in rows if row["num_groups"] > 1 and row["published_qps"]]
    assert [row["num_gpus"] for row in tested] == [512, 1024, 2048, 4096]
    assert {row["role"] for row in tested} == {"prediction"}
    for row in tested:
        assert abs(row["error_pct"]) < 7
        if row["num_gpus"] >= 2048:
            assert abs(row["error_pct"]) < abs(row["trivial_error_pct"])
    verdicts = {(row["parallelism"], row["num_gpus"]): row["oom"] for row in rows}
    assert verdicts == {(p.parallelism, p.num_gpus): p.oom for p in published("exfm")}


def test_errors_are_against_the_published_and_against_perfect_scaling(exfm):
    _, rows = evaluate(Case("as assumed", exfm, {}))
    row = next(row for row in rows if row["num_gpus"] == 4096 and row["published_qps"])
    assert row["trivial_error_pct"] == pytest.approx(100 * (1.76e5 * 16 / 2.53e6 - 1))
    assert row["error_pct"] == pytest.approx(100 * (row["qps"] / 2.53e6 - 1))


def test_the_case_without_1024_does_not_know_of_it(exfm):
    case = next(case for case in cases(exfm) if case.config.fit_num_gpus == [256, 512])
    other = replace(exfm, constants=replace(exfm.constants, overlap_share=0.7))
    of_other = next(case for case in cases(other) if case.config.fit_num_gpus == [256, 512])
    fitted, rows = evaluate(case)
    assert fitted.constants.overlap_share == FREE["overlap_share"].assumed == of_other.config.constants.overlap_share
    assert next(row for row in rows if row["num_gpus"] == 1024)["role"] == "prediction"


def test_ctr_rows_are_never_called_predictions(simulate_config):
    _, rows = evaluate(Case("as assumed", simulate_config("experiment=ctr_table"), {}))
    assert {row["role"] for row in rows} == {"fit"}
    for row, point in zip(rows, published("ctr"), strict=True):
        assert row["qps"] == pytest.approx(point.qps, rel=0.02)
        assert row["peak_memory_pct"] == pytest.approx(point.peak_memory_pct, abs=2)


def test_what_cannot_be_fitted_is_refused(exfm, simulate_config):
    with pytest.raises(
        UserError, match=r"fit_num_gpus=\[2048\]: exfm has full model parallelism at \[256, 512, 1024\]"
    ):
        fit_points(replace(exfm, fit_num_gpus=[2048]))
    with pytest.raises(UserError, match="nothing is published of workload criteo_dcnv2"):
        calibration.calibrate(simulate_config("workload=criteo_dcnv2"))
