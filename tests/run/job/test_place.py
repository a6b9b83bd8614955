from __future__ import annotations

import resource
import sys

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError
from trainspec_cli.run.job import machine as place
from trainspec_cli.run.job.machine import (
    SPARE_DESCRIPTORS,
    allow_connections,
    interface_of,
    listen,
    listening_address,
    own_address,
)


def test_the_way_to_this_host_leads_over_the_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == ("lo0" if sys.platform == "darwin" else "lo")


def test_an_address_that_no_interface_holds() -> None:
    assert interface_of("192.0.2.1") is None


def test_a_head_whose_name_is_not_known_is_told() -> None:
    with raises(MachineError, "no_route", "no-such-host.invalid") as caught:
        own_address("no-such-host.invalid")
    assert "getent hosts no-such" in caught.value.problems[0].hint


def test_a_socket_listens_at_its_address_alone() -> None:
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(MachineError, match=r"cannot listen at 127\.0\.0\.1"):
            listen("127.0.0.1", listener.getsockname()[1])


def test_the_first_host_listens_on_the_jobs_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means a loopback here may mean another address elsewhere."""
    assert listening_address("127.0.0.1") == "127.0.0.1"
    assert listening_address("localhost") == "127.0.0.1"
    monkeypatch.setattr(place, "own_address", lambda head: "127.0.1.1")
    assert listening_address("node1") == ""
    monkeypatch.setattr(place, "own_address", lambda head: "10.1.2.3")
    assert listening_address("node1") == "10.1.2.3"


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [
        (1024, 4096 + SPARE_DESCRIPTORS, 2000 + SPARE_DESCRIPTORS),
        (1024, 1500, 1500),
        (1024, resource.RLIM_INFINITY, 2000 + SPARE_DESCRIPTORS),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (2000 + SPARE_DESCRIPTORS, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_is_raised_where_it_is_too_low(
    soft: int, hard: int, allowed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    allow_connections(2000)
    assert raised == ([] if allowed is None else [(allowed, hard)])
