"""Namespaces that end with the process that asked for them, whatever ends it.

The testbed's interfaces, mounts and processes live in network, mount and process namespaces of their own, below one
process. The kernel ends all of them with that process, and that process ends when the far end of its lifeline, a pipe,
is closed: by the tool in order, or by the kernel if the tool is killed. So there is nothing that could be left behind.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from sparse2d.errors import UserError

# Number of the file descriptor of the lifeline, and the tool that holds its other end.
LIFELINE = "SPARSE2D_TESTBED_LIFELINE"
TOOL = "SPARSE2D_TESTBED_TOOL"
# Seconds that ranks get to end in order: torchrun's own, and some.
GRACE_S = 40
NEEDED = ("unshare", "mount", "ip", "tc")


def command_prefix() -> list[str]:
    """The command that puts another one into namespaces.

    Raises:
        UserError: if the programs are missing, or the system does not allow it.
    """
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise UserError(f"the testbed needs {', '.join(missing)}: install iproute2 and util-linux")
    # Anyone may be root of a user namespace, where the system allows that.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    prefix = ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    probe = (
        "mount -t tmpfs none /run && ip link add eth0 type veth peer name eth1 && tc qdisc add dev eth0 root tbf "
        + ("rate 1mbit burst 32kb latency 50ms")
    )
    done = subprocess.run([*prefix, "sh", "-c", probe], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"the testbed needs root, or user namespaces, with veth and tbf in the kernel ({reason})")
    return prefix


def run_in_sandbox(module: str, arguments: Sequence[str]) -> int:
    """Run a module of this package as the first process of new namespaces and return its exit code.

    On Ctrl-C and SIGTERM, which the caller has turned into exceptions, it is asked to end in order first.
    """
    prefix = command_prefix()
    theirs, ours = os.pipe()
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *arguments],
        env=os.environ | {LIFELINE: str(theirs), TOOL: tool_name(os.getpid())},
        pass_fds=[theirs],
        # Ctrl-C reaches the whole terminal group; the sandbox ends by its lifeline alone.
        start_new_session=True,
    )
    os.close(theirs)
    try:
        return process.wait()
    except BaseException:
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            os.write(ours, b"end")
            process.wait(GRACE_S)
        raise
    finally:
        os.close(ours)
        process.wait()


def tool_name(pid: int) -> str:
    """A process for good: its number may be given again."""
    return f"{pid}@{psutil.Process(pid).create_time()}"


def hold_lifeline(end_in_order: Callable[[], None]) -> None:
    """Inside the sandbox: have ``end_in_order`` called when asked for, and end at once with the tool."""
    lifeline = int(os.environ.pop(LIFELINE))

    def watch() -> None:
        while os.read(lifeline, 16):
            end_in_order()
        # The first process of its namespace: the kernel kills all others.
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def clean() -> int:
    """End the processes of sandboxes whose tool is gone, if the kernel has left any; returns how many."""
    ended = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            tool = process.environ().get(TOOL)
            if tool is not None and not _lives(tool):
                process.kill()
                ended += 1
    return ended


def _lives(tool: str) -> bool:
    try:
        return tool_name(int(tool.split("@")[0])) == tool
    except psutil.NoSuchProcess:
        return False
