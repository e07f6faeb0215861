"""What a run's record says of its steps' phases and bytes, and the trace beside it."""

import json

from configs import tiny_overrides

from sparse2d.phases import Phase


def only_run(results_dir):
    (path,) = (results_dir / "runs" / "adhoc").iterdir()
    return path


def test_timing_and_profile_add_to_the_record_and_change_no_result(tmp_path, program):
    records = {}
    for name, options in {"plain": [], "measured": ["timing=phases", "profile=true"]}.items():
        results = tmp_path / name
        two_d = ["parallelism=sparse_2d", "parallelism.num_groups=2", "tracking.mode=disabled"]
        # 30 steps.
        ended = program("train", *tiny_overrides(results, tmp_path / "rows", 2100), *two_d, *options)
        assert ended.code == 0
        path = only_run(results)
        records[name] = json.loads((path / "record.json").read_text())
    plain, measured = records["plain"], records["measured"]
    assert measured["fingerprint"] != plain["fingerprint"]
    assert measured["eval"] == plain["eval"]
    assert measured["train"]["loss_last"] == plain["train"]["loss_last"]
    assert measured["comms"]["collectives"] == plain["comms"]["collectives"]
    # Bytes are counted in the first 20 steps, and the counter is gone after them.
    assert plain["comms"]["counted_steps"] == 20
    gradients = [
        kind for kind in plain["comms"]["collectives"] if (kind["purpose"], kind["dtype"]) == ("dense", "float32")
    ]
    assert [kind["calls_per_step"]["mean"] for kind in gradients] == [1]
    assert "phases_ms" not in plain["train"]
    phases = measured["train"]["phases_ms"]
    assert set(phases) == {phase.name for phase in Phase}
    assert all(len(phase["per_rank"]) == 2 for phase in phases.values())
    averaging = phases["averaging"]["slowest"]["mean"]
    assert f", averaging {averaging:.3g}" in ended.log.partition("ms of a step, mean on the slowest rank: data ")[2]
    for phase in phases.values():
        assert phase["slowest"]["p50"] == max(rank["p50"] for rank in phase["per_rank"])
    # Phases are all of a step: sums of their fastest and slowest deciles enclose its median.
    assert sum(phase["slowest"]["p10"] for phase in phases.values()) <= measured["train"]["step_ms"]["p90"]
    assert sum(phase["slowest"]["p90"] for phase in phases.values()) >= measured["train"]["step_ms"]["p10"]
    for rank in range(2):
        events = json.loads((path / "trace" / f"rank-{rank}.json").read_text())["traceEvents"]
        steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}
        # Ten steps warm up.
        assert steps == {f"ProfilerStep#{step}" for step in range(10, 15)}


def test_phases_that_overlap_are_refused(tmp_path, program):
    options = [*tiny_overrides(tmp_path, tmp_path), "timing=phases", "pipeline=sparse_dist"]
    ended = program("train", *options)
    assert ended.code == 1
    assert "timing=phases needs pipeline=none" in ended.err
