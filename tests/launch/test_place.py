from __future__ import annotations

import socket
import sys

import pytest

from trainspec_cli.errors import MachineError
from trainspec_cli.launch.place import free_port, interface_of, own_address


def test_the_way_to_this_host_leads_over_the_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == ("lo0" if sys.platform == "darwin" else "lo")


def test_an_address_that_no_interface_holds() -> None:
    assert interface_of("192.0.2.1") is None


def test_a_head_whose_name_is_not_known_is_told() -> None:
    with pytest.raises(MachineError, match=r"finds no way to the first host, no-such-host\.invalid") as caught:
        own_address("no-such-host.invalid")
    assert "getent hosts no-such-host.invalid" in caught.value.problems[0].hint


def test_a_free_port_can_be_taken() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass
