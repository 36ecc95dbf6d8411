"""The cluster that a sweep starts for itself: only this machine can reach it, and only with its token (slow)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="reads /proc"),
]
START = """
import os, sys
from cgru.experiments.cluster import connect
connect(None)
import ray
@ray.remote
def double(x):
    return 2 * x
print(ray.get(double.remote(21)), ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.nodes())"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
LISTENING = "0A"


def family(pid: int) -> set[int]:
    """A process and all that it started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> set[str]:
    """Addresses, in hexadecimal as in /proc/net/tcp, on which these processes take connections."""
    sockets = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(handle))
            except OSError:
                continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in sockets}


def test_nobody_else_can_reach_it(tmp_path: Path) -> None:
    # Whatever the user's environment says: a cluster runs any code that it is sent.
    env = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", START], env=env, **pipes) as process:
        try:
            assert process.stdout is not None
            answer, address = process.stdout.readline().split()
            assert answer == "42"
            found = listening(family(process.pid))
            assert found and found <= set(LOOPBACK)
            outsider = {**env, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray looks for it at another address
            command = [sys.executable, "-c", JOIN, address]
            joined = subprocess.run(command, env=outsider, capture_output=True, text=True, timeout=60)
            assert joined.returncode != 0 and joined.stdout == ""
            assert "auth" in joined.stderr.lower()
            assert list(tmp_path.iterdir()) == []  # no token on a disk
        finally:
            process.communicate("", timeout=60)
