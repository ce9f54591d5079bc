"""How the ranks of one model find each other: rank 0 listens, the scheduler tells the others where, and torch.distributed opens over it.

What must be the same on every rank and cannot be configured (the number type that this machine computes fastest) is decided by
rank 0. Sockets between ranks are neither encrypted nor authenticated, by gloo and NCCL alike: they belong on a network of their own.
"""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Final, Protocol

import structlog
import torch
import torch.distributed as dist

from pagecast_wire.plan import GroupFormed
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.parallel import ByTorch, Ranks

COLLECTIVE_TIMEOUT: Final = timedelta(minutes=5)
"""How long a rank waits for another in a collective before it gives up: far above any difference between ranks that are alive."""

NO_MULTICAST: Final = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""NVLink multicast is state of the switches, which outlives a process that dies at the wrong moment and is shared by a host's users."""
_MEET_TIMEOUT: Final = timedelta(minutes=2)
_LOOK_S: Final = 0.05
_SIOCGIFADDR: Final = 0x8915  # linux/sockios.h
_log = structlog.get_logger(__name__)


class Meeting(Protocol):
    """The scheduler's part: brings ranks together, and says when one is not wanted any more."""

    def join(self, model_digest: str, address: str) -> GroupFormed:
        """Waits until every rank has joined. Raises LoadError, Stopped."""

    def heed(self) -> object:
        """Raises LoadError or Stopped if this rank was told to stop."""


class Group:
    """This rank's membership from `meet` on. is_device: collectives run on the device's own stream, so that graphs can hold them.
    is_one_host: no rank is on another host."""

    def __init__(self, config: WorkerConfig, device: torch.device, meeting: Meeting) -> None:
        self._config, self._device, self._meeting = config, device, meeting
        self.is_device = self.is_one_host = False

    def meet(self, model_digest: str) -> None:
        """Find the other ranks and open the process group. Raises LoadError, Stopped."""
        config, host = self._config, self._host()
        listener = socket.create_server((host, 0)) if config.rank == 0 else None
        address = f"{host}:{listener.getsockname()[1]}" if listener else ""
        store = self._store(*_parted(address), listener) if listener else None  # listens before anybody hears of it
        formed = self._meeting.join(model_digest, address)
        self._store_of_group = dist.PrefixStore(formed.group, store or self._store(*_parted(formed.address), None))
        devices = [self._told(f"device/{rank}", _identity(self._device), rank) for rank in range(config.tensor_parallel_size)]
        self.is_device = self._device.type == "cuda" and len(set(devices)) == len(devices)
        self.is_one_host = len({device.partition("/")[0] for device in devices}) == 1
        backend = "nccl" if self.is_device else "gloo"
        os.environ.update(NO_MULTICAST)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, ("=" if variable.startswith("NCCL") else "") + _interface_of(host))
        dist.init_process_group(
            backend, store=self._store_of_group, rank=config.rank, world_size=config.tensor_parallel_size, timeout=COLLECTIVE_TIMEOUT,
            device_id=self._device if self.is_device else None,
        )
        _log.info("group opened", backend=backend, rank=config.rank, size=config.tensor_parallel_size, address=formed.address)

    def ranks(self, hidden: int, dtype: torch.dtype) -> Ranks:
        """This rank and its collectives. hidden: elements of a row of hidden states; dtype: of what is summed."""
        ranks = Ranks(self._config.rank, self._config.tensor_parallel_size, ByTorch(self._device))
        if not (self.is_device and self.is_one_host):
            return ranks
        from pagecast_worker.peer_memory import device_collectives

        return replace(ranks, collectives=device_collectives(ranks, self._device, hidden, dtype))

    def agreed(self, name: str, choose: Callable[[], str]) -> str:
        """What rank 0 chooses, on every rank."""
        return self._told(name, choose() if self._config.rank == 0 else "", 0)

    def wait_for_all(self, name: str) -> None:
        """Returns once every rank has come here, however long they take. Raises LoadError or Stopped if told to stop meanwhile."""
        self._store_of_group.add(name, 1)
        while self._store_of_group.add(name, 0) < self._config.tensor_parallel_size:
            self._meeting.heed()
            time.sleep(_LOOK_S)

    def _told(self, name: str, value: str, by: int) -> str:
        if self._config.rank == by:
            self._store_of_group.set(name, value)
        return self._store_of_group.get(name).decode()  # type: ignore[no-any-return]

    def _store(self, host: str, port: int, listener: socket.socket | None) -> dist.TCPStore:
        try:
            return dist.TCPStore(
                host, port, self._config.tensor_parallel_size, listener is not None, _MEET_TIMEOUT, False,
                master_listen_fd=listener.detach() if listener else None,
            )
        except dist.DistError as error:
            raise RuntimeError(f"rank 0 cannot be reached at {host}:{port}") from error

    def _host(self) -> str:
        """The address of this host that other ranks can reach: the one that it reaches the scheduler from."""
        endpoint = self._config.workers_endpoint
        if not endpoint.startswith("tcp://"):
            return "127.0.0.1"
        host, port = _parted(endpoint.removeprefix("tcp://"))
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))
                return str(probe.getsockname()[0])
        except OSError as error:
            raise LoadError(f"cannot reach the scheduler's address {host}: {error.strerror}") from None


def _parted(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _identity(device: torch.device) -> str:
    """Host and device, so that either can be told apart. Every CPU of a host is the same device."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        host = file.read().strip()
    return f"{host}/{torch.cuda.get_device_properties(device).uuid if device.type == 'cuda' else 'cpu'}"


def _interface_of(host: str) -> str:
    """Name of the network interface with this IPv4 address. Raises LoadError."""
    wanted = socket.inet_aton(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if answer[20:24] == wanted:
                return name
    raise LoadError(f"no network interface of this host has the address {host}")
