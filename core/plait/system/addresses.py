"""Where other machines reach this one: its address towards them, and the interface that has it."""

import array
import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

ALL_IPV4 = 0x8912  # Linux: SIOCGIFCONF
ENTRY = 40  # bytes of one answer: 16 of the interface's name, then a sockaddr_in


def towards(host: str, port: int) -> str | None:
    """The address from which packets to `host` leave; None if no way leads there. Sends nothing.

    Host names need not say it: Debian's own name is 127.0.1.1, a container's is often unknown to others.
    """
    for target, own in _ways(host, port):
        return target if is_loopback(target) else own
    return None


def is_here(host: str, port: int) -> bool:
    """Whether `host` is this machine: packets to an own address leave from it."""
    return any(target == own or is_loopback(target) for target, own in _ways(host, port))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _ways(host: str, port: int) -> list[tuple[str, str]]:
    """(an address of `host`, this machine's address towards it), for each that can be reached."""
    addresses = []
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(target)
                addresses.append((str(target[0]), str(way.getsockname()[0])))
    return addresses


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`; None if that cannot be found out."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        if ":" in address:
            return _by_ipv6().get(ipaddress.ip_address(address.partition("%")[0]).packed)
        return _by_ipv4().get(socket.inet_aton(address))
    return None


def _by_ipv4() -> dict[bytes, str]:
    import fcntl

    entries = array.array("B", bytes(ENTRY * 1024))
    start, size = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, ALL_IPV4, struct.pack("iL", size, start))
    data = entries.tobytes()[: struct.unpack("iL", answer)[0]]
    parts = [data[at : at + ENTRY] for at in range(0, len(data), ENTRY)]
    return {part[20:24]: part[:16].split(b"\0")[0].decode().partition(":")[0] for part in parts}


def _by_ipv6() -> dict[bytes, str]:
    lines = Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
    return {bytes.fromhex(line.split()[0]): line.split()[-1] for line in lines}
