"""The testbed as its users run it: what ranks record on it, and that nothing of it outlives any ending."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import programs
import psutil
import pytest
import yaml
from configs import tiny_overrides
from programs import environment

from sparse2d.errors import UserError
from sparse2d.testbed.__main__ import parse
from sparse2d.testbed.sandbox import TOOL, command_prefix

PATIENCE_S = 200
MBIT = 200


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    try:
        command_prefix()
    except UserError as error:
        pytest.skip(str(error))


def started(*arguments: str, **changes: str) -> AbstractContextManager[subprocess.Popen[str]]:
    env = environment(WANDB_MODE="disabled", **changes)
    return programs.started(*arguments, module="sparse2d.testbed", stderr=subprocess.STDOUT, env=env)


def run(*arguments: str, **changes: str) -> tuple[int, str]:
    with started(*arguments, **changes) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out


def two_hosts(results: Path, *options: str) -> list[str]:
    overrides = [*tiny_overrides(results, results / "rows"), "tracking.mode=disabled", "launch.num_ranks=4"]
    return ["run", "hosts=2", "ranks_per_host=2", f"inter_host_mbit={MBIT}", "--", *overrides, *options]


@pytest.mark.slow
def test_measure_prints_a_hardware_file():
    code, out = run("measure", "hosts=2", "ranks_per_host=2", f"inter_host_mbit={MBIT}")
    assert code == 0, out
    content = yaml.safe_load(out[out.index("# Hosts in miniature") : out.index("# alltoall_efficiency")])
    assert 0.7 * MBIT < content["nic_gb_per_s"] * 8e3 < 1.1 * MBIT
    assert 0 < content["nic_efficiency"] <= 1
    assert content["host_gb_per_s"] > content["nic_gb_per_s"]
    code, out = run("measure", "hosts=1")
    assert code == 1
    assert "hosts=1 and ranks_per_host=2 must be at least 2" in out


def only_record(results: Path) -> dict:
    (path,) = (results / "runs" / "adhoc").glob("*/record.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_ranks_record_the_network_that_they_ran_on(tmp_path):
    """Groups inside hosts: only dense gradients and averaging leave a host."""
    # Wide rows: of large messages headers are a small share.
    two_d = ["parallelism=sparse_2d", "parallelism.num_groups=2", "parallelism.replicas=inter_host"]
    two_d += ["max_steps=10", "model.embedding_dim=128", "model.dense_arch=[16,128]"]
    code, out = run(*two_hosts(tmp_path, *two_d))
    assert code == 0, out
    record = only_record(tmp_path)
    assert record["provenance"] == "shaped"
    assert record["testbed"]["config"] == {"hosts": 2, "ranks_per_host": 2, "inter_host_mbit": MBIT}
    assert 0.7 * MBIT < record["testbed"]["inter_host"]["mbit"] < 1.1 * MBIT
    # Inside a host no bucket is in the way.
    assert record["testbed"]["intra_host"]["mbit"] > 3 * MBIT
    sent = {
        name: count for line in re.findall("sent bytes: (.*)", out) for name, count in re.findall(r"(\w+) (\d+)", line)
    }
    assert set(sent) == {"lo", "eth0"}
    # Host 1 measures its link for a second before the ranks start; that is not theirs.
    assert int(sent["eth0"]) < 0.7 * MBIT * 1e6 / 8
    # Per host, lookups of two ranks in ten steps.
    assert int(sent["lo"]) > record["comms"]["lookup_bytes_per_step"]["mean"] * 10 * 2
    comms = record["comms"]
    links = {link: sent["mean"] for link, sent in comms["link_bytes_per_step"].items()}
    # Of the ring of all ranks one edge leaves a host; of the two rings of replicas, both. Headers come on top.
    crossing = comms["dense_bytes_per_step"]["mean"] + 2 * comms["sync_bytes_per_sync"]["mean"]
    assert crossing < links["between_hosts"] < 1.3 * crossing
    assert 2 * comms["lookup_bytes_per_step"]["mean"] < links["inside_host"]
    # All that two ranks send, of everything that is counted, is what their host's interfaces carried.
    counted = ("lookup_bytes_per_step", "dense_bytes_per_step", "sync_bytes_per_sync")
    share = sum(links.values()) / sum(2 * comms[name]["mean"] for name in counted)
    assert 1 < share < 1.05, share


@pytest.mark.slow
def test_traffic_inside_a_host_takes_the_loopback_and_is_not_shaped(tmp_path):
    options = [option for option in two_hosts(tmp_path, "max_steps=10", "launch.num_ranks=2") if option != "hosts=2"]
    code, out = run(options[0], "hosts=1", *options[1:])
    assert code == 0, out
    sent = dict(re.findall(r"(\w+) (\d+)", out.split("sent bytes: ")[1]))
    counted = only_record(tmp_path)["comms"]["lookup_bytes_per_step"]["mean"] * 10 * 2
    assert int(sent["lo"]) > counted
    assert int(sent["eth0"]) < 10_000


def living(tool: str) -> list[str]:
    """Command lines of processes of a testbed."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(TOOL, "").startswith(f"{tool}@"):
                found.append(" ".join(process.cmdline()))
    return found


def network() -> list[str]:
    """Names of interfaces and of namespaces that anyone can see."""
    return [
        subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout
        for what in (["-brief", "link"], ["netns", "list"])
    ]


def wait_until(holds: Callable[[], bool], otherwise: str = "") -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "terminate", "interrupt", "kill_unshare"])
def test_nothing_is_left_of_a_testbed_that_is_stopped_at_a_random_moment(tmp_path, how):
    before = network()
    # While the tool starts, or from the first namespace to ranks that train.
    waits_for_sandbox = random.random() < 0.75
    after_s = random.uniform(0, 12 if waits_for_sandbox else 4)
    with started(*two_hosts(tmp_path, "data.synthetic.rows=60000")) as process:
        tool = str(process.pid)
        if waits_for_sandbox:
            wait_until(lambda: living(tool) != [])
        with suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        if how == "kill_unshare":
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children():
                    child.kill()
        else:
            process.send_signal({"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}[how])
        process.wait(PATIENCE_S)
    wait_until(lambda: living(tool) == [], f"stopped after {after_s} s")
    assert network() == before


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    for arguments, said in {
        ("run", "hosts=0"): "hosts=0 must be in 1 to 64",
        ("run", "inter_host_mbits=5"): "did you mean 'inter_host_mbit'?",
        ("run", "hosts=many"): "hosts:",
    }.items():
        code, out = run(*arguments, "--")
        assert code == 1
        assert said in out
        assert len(out.splitlines()) == 1
    code, out = run("run", PATH=str(tmp_path))
    assert code == 1
    assert out == "sparse2d.testbed: error: the testbed needs unshare, mount, ip, tc: install iproute2 and util-linux\n"


def test_options_are_typed():
    assert parse(["hosts=4", "inter_host_mbit=12.5"]).inter_host_mbit == 12.5
    with pytest.raises(UserError, match="ranks_per_host=0 must be at least 1"):
        parse(["ranks_per_host=0"])


def test_clean_ends_what_a_killed_tool_left(tmp_path):
    """As if the kernel had not: a process of a tool that is no more, and one of a tool that lives."""
    gone, alive = "999999999@1.0", f"{os.getpid()}@{psutil.Process().create_time()}"
    sleepers = [subprocess.Popen(["sleep", "60"], env=os.environ | {TOOL: tool}) for tool in (gone, alive)]
    try:
        code, out = run("clean")
        assert (code, out) == (0, "ended 1 processes of testbeds whose tool is gone\n")
        assert sleepers[0].wait(5) == -signal.SIGKILL
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
