"""Two hosts for a test: network namespaces with a link between them where that is allowed, else two loopback addresses of this host."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """prefix: words in front of a command that make it run on this host. address: by which the other host reaches it."""

    prefix: tuple[str, ...]
    address: str


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """A new pair. Says which kind it is, so that a log shows what was tested."""
    names = [f"pagecast-{os.getpid()}-{side}" for side in "ab"]
    ends = [f"pc{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for place, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            _ip("-n", name, "addr", "add", f"10.213.7.{place}/24", "dev", end)
            for device in (end, "lo"):
                _ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError):
        _remove(names)
        print("two loopback addresses stand in for two hosts")
        yield Host((), "127.0.0.1"), Host((), "127.0.0.2")
        return
    try:
        yield tuple(Host(("ip", "netns", "exec", name), f"10.213.7.{place}") for place, name in enumerate(names, 1))  # type: ignore[misc]
    finally:
        _remove(names)


def _remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
