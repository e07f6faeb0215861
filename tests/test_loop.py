"""The training loop: what it makes of losses, scores and pauses."""

import logging
from pathlib import Path

import loop_ranks
import numpy as np
import pytest
from configs import tiny_train

from sparse2d.launch import run_ranks
from sparse2d.loop import warn_if_useless
from sparse2d.metrics import evaluate_logits


def test_windows_of_all_ranks_are_one():
    alike, *said = run_ranks(loop_ranks.windows, num_ranks=3)
    # Ranks have losses of .5, 1.5 and 2.5; without a positive there is no base rate to normalise by.
    assert alike == {"loss": pytest.approx(1.5), "ne": None}
    assert len(said) == 2
    for text in said:
        assert text.startswith("the loss is not finite at step 13 on rank 2;")


def test_evaluations_saves_and_dropped_rows_do_not_count_as_training(tiny_dataset: Path, tmp_path: Path):
    config = tiny_train(tmp_path, save_every=5)
    config.eval_every, config.global_batch_size = 4, 70
    config.data.eval_rows = 1
    record = run_ranks(loop_ranks.with_slow_pauses, config, tiny_dataset, tmp_path / "run", num_ranks=2)
    # One row has one label, and so neither an NE nor an AUC; what comes after goes on.
    assert (record["eval"]["ne"], record["eval"]["auc"], record["eval"]["rows"]) == (None, None, 1)
    found = record["train"]
    assert (found["steps"], found["rows"], found["dropped_rows"]) == (17, 1190, 10)
    dropped = "the last 10 training rows fill no batch of 70 and are dropped"
    assert dropped in (tmp_path / "run" / "run.log").read_text()
    # Of 17 steps the last nine are timed: evaluations after 12 and 16 and saves after 10 and 15 are between them.
    timed_s = (found["steps"] - found["warmup_steps"]) * config.global_batch_size / found["qps"]
    assert timed_s < 4 * loop_ranks.PAUSE_S / 2
    assert found["step_ms"]["p90"] < loop_ranks.PAUSE_S * 1e3 / 2


def test_a_model_that_learned_nothing_is_said_to_be_one(caplog):
    labels = np.tile([0.0, 1.0, 0.0, 0.0], 500)
    know_nothing, know_something = np.tile([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0], 250), labels * 2 - 2
    with caplog.at_level(logging.WARNING, logger="sparse2d.loop"):
        warn_if_useless(evaluate_logits(know_something, labels))
        assert not caplog.records
        # Half of either kind has either logit.
        warn_if_useless(evaluate_logits(know_nothing, labels))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["NE", "AUC"]
