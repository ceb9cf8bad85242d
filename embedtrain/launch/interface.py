"""The network interface that leads to another node: gloo would take the one that the host's own name resolves to.

On many a node that is 127.0.1.1, and then others are told to connect to themselves.
"""

import socket

import psutil


def interface_towards(address: str) -> str | None:
    """The name of the interface through which an address is reached; None: nobody can tell.

    Args:
        address: a host's name or IP address.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it asks for the way
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address.partition("%")[0] == own for each in addresses):
            return str(name)
    return None
