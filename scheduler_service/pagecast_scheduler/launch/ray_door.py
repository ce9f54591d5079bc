"""Whom a Ray cluster lets in. Whoever it lets in runs code on every host of it, so one that others can reach must ask for a token.

The cluster is asked, not believed: a small process knocks without a token, and where that is turned away another one with ours. They are
processes because Ray reads how to authenticate once in a process's life. Waits for them; keeps nothing.
"""

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

from pagecast_scheduler.launch.run_dir import LaunchError

MODE: Final = "RAY_AUTH_MODE"
_TOKENS: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_DIAL_S: Final = 10.0
_ANSWER_S: Final = 90.0
_LET_IN: Final = 0
_TURNED_AWAY: Final = 3
_KNOCK: Final = f"""
import sys
import ray
from ray._raylet import GcsClient
try:
    GcsClient(sys.argv[1]).cluster_id
except ray.exceptions.AuthenticationError:
    sys.exit({_TURNED_AWAY})
"""


def seen_by_ray(address: str) -> str:
    """Where Ray looks for a cluster at `address` (host:port): for a loopback address, at this host's own if it has one. Raises
    LaunchError for what is no address."""
    if not _is_loopback(_host(address)):
        return address
    done = _run("import ray; print(ray.util.get_node_ip_address())", dict(os.environ))
    return f"{done.stdout.strip()}:{address.rpartition(':')[2]}" if done.returncode == 0 else address


def check(address: str) -> bool:
    """Whether the cluster whose head is at `address` asks for a token, which then is ours. Sets RAY_AUTH_MODE where it does and nothing
    is said there. Raises LaunchError: unreachable, open to anybody though others reach it, or it does not take our token."""
    _dial(address)
    answer = _knock(address, {name: value for name, value in os.environ.items() if name not in _TOKENS} | {MODE: "disabled"})
    if answer == _LET_IN:
        check_hosts(address, [_host(address)])
        return False
    if answer != _TURNED_AWAY:
        raise LaunchError(f"cannot tell whom the Ray cluster at {address} lets in: it answers no Ray {_version()} client")
    os.environ.setdefault(MODE, "token")
    if _knock(address, dict(os.environ)) != _LET_IN:
        raise LaunchError(f"the Ray cluster at {address} wants a token that is not ours: {MODE}=token, and it in {' or '.join(_TOKENS)}")
    return True


def check_hosts(address: str, hosts: Iterable[str]) -> None:
    """For a cluster that asks nobody who they are. Raises LaunchError if others reach one of its hosts."""
    if reachable := sorted(host for host in hosts if not _is_loopback(host)):
        raise LaunchError(
            f"refusing the Ray cluster at {address}: it lets in whoever reaches {reachable[0]}; start it with {MODE}=token on every host"
        )


def _host(address: str) -> str:
    """Raises LaunchError for what is no host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise LaunchError(f"RAY_ADDRESS must be host:port of the cluster's head, got {address!r}")
    return host.strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _dial(address: str) -> None:
    """A client of Ray's takes most of a minute to see that nobody listens."""
    try:
        socket.create_connection((_host(address), int(address.rpartition(":")[2])), timeout=_DIAL_S).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(f"cannot reach the Ray cluster at {address}: {getattr(error, 'strerror', None) or error}") from None


def _knock(address: str, environment: dict[str, str]) -> int:
    """How it went for a client with these variables: _LET_IN, _TURNED_AWAY, or something else."""
    return _run(_KNOCK, environment, address).returncode


def _run(program: str, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """A process that imports ray. What takes too long has failed."""
    command = [sys.executable, "-P", "-c", program, *words]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", "")


def _version() -> str:
    from importlib.metadata import version

    return version("ray")
