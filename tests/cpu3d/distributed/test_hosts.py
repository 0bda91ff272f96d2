import socket

import pytest

from cpu3d.distributed import hosts
from cpu3d.distributed.hosts import (
    LOOPBACK,
    addresses,
    check_free,
    free_ports,
    own_addresses,
    own_choice,
    own_index,
    read_hosts,
)
from cpu3d.errors import InputError

NAMES = {"n1": {"10.0.0.1"}, "n2": {"10.0.0.2"}, "n3": {"fd00::3"}, "also-n2": {"10.0.0.2"}}


def index(hosts, own):
    return own_index(hosts, lambda: frozenset(own), lambda host: frozenset(NAMES.get(host, {host.strip("[]")})))


def test_a_list_or_a_file_names_the_hosts(tmp_path):
    assert read_hosts("a, b,10.0.0.1") == ("a", "b", "10.0.0.1")
    file = tmp_path / "hosts"
    file.write_text("# the first rack\na\n\n b  # slow\n[fd00::3]\n")
    assert read_hosts(str(file)) == ("a", "b", "[fd00::3]")
    file.write_text("a slots=2\n")
    for text in (str(file), "", ",", "a:1/b"):
        with pytest.raises(InputError, match="--hosts must be names"):
            read_hosts(text)


@pytest.mark.parametrize(
    ("hosts", "own", "here"),
    [
        (("n1", "n2"), {"10.0.0.2", "127.0.0.1"}, 1),
        (("10.0.0.1", "10.0.0.2"), {"10.0.0.1"}, 0),
        (("n1", "n3"), {"fd00::3", "10.0.0.9"}, 1),
        (("[fd00::2]", "[fd00::3]"), {"fd00::3"}, 1),
    ],
)
def test_this_host_is_the_one_with_its_addresses(hosts, own, here):
    assert index(hosts, own) == here


def test_a_host_knows_its_name_where_it_resolves_to_nothing_else(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "n7.cluster.org")
    assert index(("n6", "n7"), {"10.0.0.7"}) == 1
    assert index(("n6.cluster.org", "n7.cluster.org"), {"10.0.0.7"}) == 1
    with pytest.raises(InputError, match="got none"):
        index(("n7.other.org", "n8"), {"10.0.0.7"})
    monkeypatch.setitem(NAMES, "n7", {"127.0.1.1"})  # as Debian has it in /etc/hosts
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert index(("n6", "n7"), {"10.0.0.7"}) == 1


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (("n1", "n3"), "once, got none of n1, n3; give --host-index"),
        (("n2", "also-n2"), "got n2 and also-n2"),
        (("localhost", "n2"), "what the others reach them by, got localhost"),
        (("n1", "127.0.0.1"), "got 127.0.0.1"),
        (("n1", "[::1]"), "got"),
    ],
)
def test_a_list_that_does_not_tell_is_refused(hosts, said):
    with pytest.raises(InputError, match=said.replace("[", r"\[")):
        index(hosts, {"10.0.0.2"})


def test_this_machine_has_addresses_and_names_resolve():
    assert LOOPBACK in own_addresses() | {LOOPBACK}
    assert addresses("127.0.0.1") == {"127.0.0.1"}
    assert addresses("[::1]") <= {"::1"}
    assert addresses("a..b") == frozenset()
    assert own_index(("127.0.0.1",)) == 0


def test_chosen_ports_are_free_and_a_taken_one_is_named():
    ports = free_ports(3)
    assert len(set(ports)) == 3
    check_free(ports)
    with socket.socket() as listener:
        listener.bind(("", ports[1]))
        listener.listen()
        with pytest.raises(InputError, match=f"port {ports[1]} must be free on this host") as caught:
            check_free(ports)
    assert len(caught.value.problems) == 1


def test_chosen_ports_are_none_that_the_system_gives_to_others(monkeypatch, tmp_path):
    assert not set(free_ports(200)) & set(own_choice())
    file = tmp_path / "ip_local_port_range"
    file.write_text("20000\t65533\n")
    assert own_choice(file) == range(20000, 65534)
    assert own_choice(tmp_path / "none") == range(32768, 65536)
    monkeypatch.setattr(hosts, "own_choice", lambda: own_choice(file))
    assert len(set(free_ports(4))) == 4, "two of them by the system's own choice"
