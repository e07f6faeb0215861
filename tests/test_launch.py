"""Real ranks from the fork server: results, and what is told when one of them fails."""

import time

import psutil
import pytest
from ranks import busy_teardown, echo_rank, fail_on_rank

from sparse2d.errors import UserError
from sparse2d.launch import RanksFailedError, run_ranks

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


def test_ranks_run_again_after_a_failure():
    with pytest.raises(UserError):
        run_ranks(fail_on_rank, 1, "user", num_ranks=2)
    assert run_ranks(echo_rank, num_ranks=2)["WORLD_SIZE"] == "2"
