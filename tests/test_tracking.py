"""wandb when its server does not answer, and the picture of a run."""

import json
import os
import subprocess
import sys

from wandb_files import exit_codes, logged_steps, offline_runs

from sparse2d.curves import draw_curves

ONLINE = """
import logging, sys
from pathlib import Path
from sparse2d.config import TrackingConfig, WandbMode
from sparse2d.tracking import Tracker

logging.basicConfig(level=logging.INFO, format="%(message)s")
config = TrackingConfig(mode=WandbMode.online)
with Tracker(config, Path(sys.argv[1]), name="n", group="g", job_type="j", settings={}) as tracker:
    tracker.log({"ne": 0.9, "auc": None}, step=3)
"""


def test_a_server_that_does_not_answer_costs_no_run(tmp_path):
    nobody = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}
    command = [sys.executable, "-c", ONLINE, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | nobody, capture_output=True, text=True, timeout=120, check=True)
    assert "this run is kept offline; `wandb sync` uploads it later" in done.stderr
    (file,) = offline_runs(tmp_path)
    assert (logged_steps(file), exit_codes(file)) == ([3], [0])


def test_the_picture_leaves_out_what_is_undefined(tmp_path):
    """No NE of a window without both labels, no QPS before the warm-up ends, nothing sent by emulated ranks."""
    points = [
        {"step": 1, "rows": 60, "loss": 0.1, "ne": None, "qps": None, "rank0/sent_bytes_per_step": None},
        {"step": 2, "rows": 120, "loss": 0.1, "ne": 0.9, "qps": 10.0, "rank0/sent_bytes_per_step": None},
        {"step": 2, "eval/ne": None, "eval/auc": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(point)}\n" for point in points))
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture[:4] == b"\x89PNG"
    # NE and QPS, without a panel of bytes: two panels of 3.4 inches at 120 dots.
    assert int.from_bytes(picture[16:20], "big") == 2 * 3.4 * 120
