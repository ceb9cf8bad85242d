"""The network interfaces that ranks listen on: loopback on a single host, for the store that of MASTER_ADDR."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from embedtrain.distributed.srun import interface_for


def stay_on_host(environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen on the loopback interface, unless the environment names others."""
    loopback = interface_for("127.0.0.1")
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)


def open_store(rank: int, size: int, timeout: float, *, is_one_host: bool) -> Store:
    """Connect to the store of MASTER_ADDR and MASTER_PORT; rank 0 hosts it unless torchrun does, on that address only.

    torch listens on all interfaces. So does this function if MASTER_ADDR is not an address of this host, as behind an
    address translation, or is a loopback address by which other hosts cannot reach it.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and port.isdecimal():
        listener = listen(address, int(port), is_one_host=is_one_host)
        if listener is not None:
            return TCPStore(
                address,
                int(port),
                size,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))  # type: ignore[attr-defined]
    return store  # type: ignore[no-any-return]


def listen(address: str, port: int, *, is_one_host: bool) -> socket.socket | None:
    """A socket that listens on an address of this host; None if that is impossible, or not of use to other hosts."""
    with contextlib.ExitStack() as stack:
        try:
            family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            if not is_one_host and ipaddress.ip_address(target[0]).is_loopback:
                return None
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(socket.SOMAXCONN)
        except (OSError, ValueError):  # torch's own attempt names the reason
            return None
        stack.pop_all()
        return listener
