"""Outer gradients sent directly between sites: the same bits, fewer bytes at the meeting point, nothing lost."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab.drawing import slow_after

pytest.importorskip("cryptography")

from lab.link import Link
from lab.ports import free_port
from lab.sites import Site, SitesLab, kill, wait_until

from trainspec_cli.wings.sites.outlook import VALUE_BYTES

Lab = Callable[..., SitesLab]
VALUES = 60_000
"""Values of a share: an outer gradient has about 60 kB, so that a link can be cut within one."""


def three(lab: Lab, name: str, *, direct: tuple[int, ...] = (1, 2), **settings: Any) -> SitesLab:
    trial = lab(name, sites=3, **settings)
    trial.values = VALUES
    trial.open()
    for site in direct:
        trial.open_inbox(site)
    return trial


def when_connected(trial: SitesLab) -> None:
    """Let sites 1 and 2 wait for their direct connections before they first send."""
    for site, other in ((1, 2), (2, 1)):
        line = f"site {site} is connected directly"
        trial.acts[site, 3] = lambda _, other=other, line=line: wait_until(lambda: line in trial.said_by(other))


def train(trial: SitesLab) -> list[Site]:
    sites = [trial.start(number) for number in range(3)]
    trial.wait(*sites)
    trial.close()
    assert all(torch.equal(site.weights, sites[0].weights) for site in sites)
    return sites


def warnings(site: Site) -> list[str]:
    return [event["message"] for event in site.events("warning")]


@pytest.fixture(scope="module")
def known() -> list[torch.Tensor]:
    """Hold the result of `usual`, which is computed once."""
    return []


@pytest.fixture
def usual(lab: Lab, known: list[torch.Tensor]) -> torch.Tensor:
    """The weights of three sites that only use the meeting point."""
    if not known:
        known.append(train(three(lab, "usual", direct=()))[0].weights)
    return known[0]


def test_direct_connections_give_the_same_bits_with_fewer_bytes_at_the_meeting_point(lab: Lab) -> None:
    carried, weights = {}, {}
    for direct in ((), (1, 2)):
        trial = three(lab, f"direct{len(direct)}", direct=direct)
        links = {site: Link(trial.port) for site in (1, 2)}
        trial.endpoints = {site: link.port for site, link in links.items()}
        if direct:
            when_connected(trial)
        sites = train(trial)
        weights[direct] = sites[0].weights
        carried[direct] = sum(link.carried_bytes for link in links.values())
        assert all(event["sites"] == [0, 1, 2] for event in sites[0].events("exchange")[1:])
        assert len(warnings(sites[1])) == len(warnings(sites[2])) == (0 if direct else 2)
    assert torch.equal(weights[()], weights[1, 2])
    of_a_site = VALUE_BYTES["int4"] * VALUES * (5 * 2 + 4)  # five rounds of two shares, and the last of all four
    assert 6 * of_a_site < carried[()] < 1.1 * 6 * of_a_site, "for each of two sites one out, two in"
    assert 4 * of_a_site < carried[1, 2] < 1.1 * 4 * of_a_site, "one out, one in"


@pytest.mark.slow
def test_a_site_that_does_not_listen_is_reached_through_the_meeting_point_with_a_warning(
    lab: Lab, usual: torch.Tensor
) -> None:
    trial = three(lab, "trial", direct=(1,))
    first, second, third = train(trial)
    assert torch.equal(first.weights, usual)
    assert warnings(first) == []
    (warning,) = warnings(second)
    assert "site 2" in warning and "resilience.sites.listen" in warning and "meeting point" in warning
    (warning,) = warnings(third)
    assert "this site" in warning and "resilience.sites.listen" in warning
    assert trial.said.count("1 reach site 2 through") == 1


@pytest.mark.slow
def test_an_unreachable_site_is_reached_through_the_meeting_point_with_a_warning(lab: Lab, usual: torch.Tensor) -> None:
    trial = three(lab, "trial")
    trial.addresses[2] = f"127.0.0.1:{free_port()}"
    first, second, third = train(trial)
    assert torch.equal(first.weights, usual)
    (warning,) = warnings(second)
    assert "site 2" in warning and trial.addresses[2] in warning
    assert any("inbox" in warning for warning in warnings(third))
    assert trial.said.count("1 reach site 2 through") == 1


@pytest.mark.slow
def test_the_address_of_another_site_is_not_accepted(lab: Lab, usual: torch.Tensor) -> None:
    trial = three(lab, "trial")
    trial.addresses[2] = trial.addresses[1]
    first, second, _ = train(trial)
    assert torch.equal(first.weights, usual)
    assert any("another site" in warning for warning in warnings(second))


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "cuts_all"), slow_after(1, [(0.5, False), (2.5, False), (2.5, True), (5.2, False)]))
def test_a_connection_that_is_cut_within_an_outer_gradient_loses_nothing(
    lab: Lab, usual: torch.Tensor, rounds: float, *, cuts_all: bool
) -> None:
    """`cuts_all`: cut the connection from the site's own rank to its inbox too."""
    trial = three(lab, "trial")
    trial.silence_s = 600.0  # broken connections do not have to become silent
    link = Link(int(trial.addresses[2].rpartition(":")[2]))
    trial.addresses[2] = f"127.0.0.1:{link.port}"
    link.cut_at_bytes, link.cuts_all = int(rounds * 2 * VALUE_BYTES["int4"] * VALUES), cuts_all
    when_connected(trial)
    sites = train(trial)
    assert link.cuts == 1
    assert torch.equal(sites[0].weights, usual)
    assert "site 2 did not" in trial.said and "in round" in trial.said


@pytest.mark.slow
def test_a_killed_site_connects_directly_again(lab: Lab) -> None:
    trial = three(lab, "trial")

    def wait_for_return(_site: Site) -> None:
        meeting = trial.point._meeting
        wait_until(lambda: meeting.ready.get(1) == meeting.state.round)

    when_connected(trial)
    trial.acts |= {(1, 9): kill, (0, 16): wait_for_return, (2, 16): wait_for_return}
    first, killed, third = (trial.start(number) for number in range(3))
    trial.wait(killed)
    wait_until(lambda: "site 1 is lost" in trial.said)
    back = trial.start(1, killed.saves[4])
    trial.wait(first, third, back)
    trial.close()
    assert torch.equal(first.weights, third.weights) and torch.equal(first.weights, back.weights)
    assert trial.said_by(2).count("site 1 is connected") == 2
    assert "site 1 is no longer" in trial.said_by(2)


@pytest.mark.slow
def test_a_restart_of_all_sites_gives_the_same_bits(lab: Lab, usual: torch.Tensor) -> None:
    trial = three(lab, "trial")
    trial.return_s = 600.0
    when_connected(trial)
    trial.acts |= dict.fromkeys([(0, 9), (1, 12), (2, 10)], kill)
    sites = [trial.start(number) for number in range(3)]
    trial.wait(sites[0])
    trial.point.close()
    for site in sites[1:]:
        site.stop.requested = True
        trial.wait(site)
    trial.acts.clear()
    trial.open()
    again = [trial.start(site.number, site.saves[max(site.saves)]) for site in sites]
    trial.wait(*again)
    trial.close()
    assert all(torch.equal(site.weights, usual) for site in again)


def test_an_untrusted_client_at_a_sites_port_is_refused_and_the_bits_are_the_same(
    lab: Lab, usual: torch.Tensor
) -> None:
    trial = three(lab, "trial")

    def attack(_site: Site) -> None:
        host, _, port = trial.addresses[1].rpartition(":")
        for content in (b"", b"\x16\x03\x01" + bytes(200), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), 5) as client:
                client.sendall(content)
        wait_until(lambda: "connection from" in trial.said_by(1))

    when_connected(trial)
    trial.acts[0, 5] = attack
    sites = train(trial)
    assert torch.equal(sites[0].weights, usual)
    assert "no longer connected" not in trial.said_by(1).partition("connection from")[0]
    assert all(event["sites"] == [0, 1, 2] for event in sites[0].events("exchange")[1:])
