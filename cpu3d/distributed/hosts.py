"""The hosts of a list, which of them this one is, and ports that are free on it."""

import contextlib
import ipaddress
import random
import socket
from pathlib import Path
from typing import Callable, FrozenSet, List, Sequence, Tuple

import psutil

from cpu3d.errors import InputError

OPEN_PORTS = range(20000, 65536)
"""Those that are chosen from: below are more of known services."""

LOOPBACK = "127.0.0.1"
"""The host of all workers where there is only one."""


def read_hosts(text: str) -> Tuple[str, ...]:
    """Names or addresses of a list "a,b", or of a file with one a line, where # begins a comment.

    Raises InputError for an empty list, or where a line holds more than a name.
    """
    path = Path(text)
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        hosts = [line.partition("#")[0].strip() for line in lines]
    else:
        hosts = [host.strip() for host in text.split(",")]
    hosts = [host for host in hosts if host]
    wrong = [host for host in hosts if set(host) & set(" \t/=@")]
    if wrong or not hosts:
        got = ", ".join(repr(host) for host in wrong) or repr(text)
        raise InputError(f"--hosts must be names like a,b, or a file with one a line, got {got}; mend it")
    return tuple(hosts)


def own_index(
    hosts: Sequence[str],
    own: Callable[[], FrozenSet[str]] = lambda: own_addresses(),
    addresses_of: Callable[[str], FrozenSet[str]] = lambda host: addresses(host),
) -> int:
    """Which of `hosts` this one is: the one that has one of this host's addresses, or its name.

    Raises InputError where none or several are, or where one is a name that each host has for itself.
    """
    if len(hosts) > 1:
        selfish = [host for host in hosts if host.lower() == "localhost" or _is_loopback(host)]
        if selfish:
            raise InputError(f"--hosts must be what the others reach them by, got {selfish[0]}; name it otherwise")
    name, mine = socket.gethostname().lower(), own()
    here = [
        index
        for index, host in enumerate(hosts)
        if _same_name(host.lower(), name) or any(one in mine or _is_loopback(one) for one in addresses_of(host))
    ]
    if len(here) != 1:
        what = " and ".join(hosts[index] for index in here) if here else "none"
        raise InputError(
            f"--hosts must hold this host, {name}, once, got {what} of {', '.join(hosts)}; give --host-index, from 0"
        )
    return here[0]


def own_addresses() -> FrozenSet[str]:
    """Of all network interfaces here, without the zone of a local IPv6 address."""
    found = [address.address for of_one in psutil.net_if_addrs().values() for address in of_one]
    return frozenset(address.partition("%")[0] for address in found)


def addresses(host: str) -> FrozenSet[str]:
    """That a name resolves to; none where it does not."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)
    return frozenset()


def free_ports(count: int) -> Tuple[int, ...]:
    """Ports that nobody listens on, by chance, so that two launches at a time hardly meet.

    Of those that the system gives to nobody by itself, as they are not held until TensorFlow takes them; its choice
    where none of them is left.
    """
    free = [port for port in OPEN_PORTS if port not in own_choice()]
    random.SystemRandom().shuffle(free)
    with contextlib.ExitStack() as held:
        taken: List[int] = []
        for port in (*free, *(0 for _ in range(count))):
            if len(taken) == count:
                break
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("", port))
                taken.append(one.getsockname()[1])
        return tuple(taken)


def own_choice(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    """The ports that the system gives to whoever asks for any, as all outgoing connections do."""
    try:
        first, last = map(int, path.read_text(encoding="ascii").split())
        return range(first, last + 1)
    except (OSError, ValueError):
        return range(32768, 65536)


def check_free(ports: Sequence[int]) -> None:
    """Raise InputError for ports of this host that someone listens on, or that are not ours to take."""
    problems = []
    for port in ports:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a listener that has just ended
            try:
                one.bind(("", port))
            except OSError as error:
                problems.append(f"port {port} must be free on this host, got {error.strerror}; give another --port")
    if problems:
        raise InputError(*problems)


# --- Private helpers ---


def _same_name(one: str, other: str) -> bool:
    """Whether two names are of one host; one of them may lack its domain."""
    if _is_address(one):
        return False
    return one == other or (("." in one) != ("." in other) and one.split(".")[0] == other.split(".")[0])


def _is_loopback(text: str) -> bool:
    return _is_address(text) and ipaddress.ip_address(text.strip("[]")).is_loopback


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True
