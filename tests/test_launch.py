"""Real ranks from the fork server: results, and what is told when one of them fails."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from fault_ranks import fail_as_user, fail_until
from filelock import FileLock
from ranks import busy_teardown, echo_rank, fail_on_rank

from sparse2d.errors import UserError
from sparse2d.launch import SCRATCH_PREFIX, RanksFailedError, run_ranks
from sparse2d.mesh import rank_from_env

# Generous: what is bounded is minutes of waiting for a collective that never completes.
SECONDS = 60


def rank_processes() -> list[psutil.Process]:
    """Children of this process's fork server; the server itself stays, warm, and may not have run yet."""
    servers = [child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline())]
    return [rank for server in servers for rank in server.children(recursive=True)]


@pytest.fixture(autouse=True)
def _leaves_no_rank_behind():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SECONDS
    _, alive = psutil.wait_procs(rank_processes(), timeout=3)
    assert alive == []


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_result_is_rank_0s_and_ranks_know_where_they_are(num_ranks):
    assert run_ranks(echo_rank, num_ranks=num_ranks) == {
        "RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
    }


# Who notices what first is a race: run it more than once.
@pytest.mark.parametrize("_attempt", range(2))
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_root_cause_is_told_not_the_loss_of_a_peer(failing, _attempt):
    with pytest.raises(RanksFailedError, match=rf"^rank {failing}: KeyError: 'the root cause'$") as raised:
        run_ranks(fail_on_rank, failing, "raise", num_ranks=3)
    assert raised.value.cause.rank == failing
    assert "in fail_on_rank" in raised.value.cause.traceback


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_root_cause_is_told_though_peers_fall_first(seconds):
    with pytest.raises(RanksFailedError, match=r"^rank 1: KeyError: 'the root cause'$"):
        run_ranks(busy_teardown, 1, seconds, num_ranks=3)


@pytest.mark.parametrize("failing", [0, 1])
def test_user_error_stays_a_user_error(failing):
    with pytest.raises(UserError, match=r"^id 7 of feature C3 is not below its limit 5$"):
        run_ranks(fail_on_rank, failing, "user", num_ranks=2)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_killed_rank_is_named(failing):
    with pytest.raises(RanksFailedError, match=rf"^rank {failing}: killed by SIGKILL$"):
        run_ranks(fail_on_rank, failing, "kill", num_ranks=3)


def test_what_a_killed_launcher_left_is_removed():
    folder = Path(tempfile.gettempdir(), f"{SCRATCH_PREFIX}killed")
    folder.mkdir(exist_ok=True)
    os.utime(folder, (0, 0))
    alive = Path(tempfile.gettempdir(), f"{SCRATCH_PREFIX}alive")
    alive.mkdir(exist_ok=True)
    with FileLock(alive / ".lock"):
        os.utime(alive, (0, 0))
        run_ranks(echo_rank, num_ranks=1)
        assert alive.exists()
    assert not folder.exists()
    shutil.rmtree(alive)


def test_ranks_are_started_again_as_often_as_asked(tmp_path):
    assert run_ranks(fail_until, tmp_path, 2, num_ranks=2, max_restarts=2) == 2
    with pytest.raises(RanksFailedError, match=r"^rank 0: KeyError: 'attempt 1'$"):
        run_ranks(fail_until, tmp_path, 2, num_ranks=2, max_restarts=1)


def test_a_users_error_is_not_tried_again(tmp_path):
    with pytest.raises(UserError, match=r"^attempt 0 is the user's$"):
        run_ranks(fail_as_user, tmp_path, num_ranks=2, max_restarts=3)


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "-1"), ("LOCAL_RANK", ""), ("RANK", "2")])
def test_a_launchers_variables_must_be_sound(name, value, monkeypatch):
    for variable, sound in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(variable, value if variable == name else sound)
    with pytest.raises(UserError, match=name):
        rank_from_env()


def test_ranks_run_again_after_a_failure():
    with pytest.raises(UserError):
        run_ranks(fail_on_rank, 1, "user", num_ranks=2)
    assert run_ranks(echo_rank, num_ranks=2)["WORLD_SIZE"] == "2"
