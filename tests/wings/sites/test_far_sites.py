"""Distant sites: equal weights at the end, each sample once, and no wait for a lost site."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cryptography")

from lab.sites import BATCH, STEPS, Site, SitesLab, begun, kill, wait_until
from lab.waiting import PATIENCE_S

from trainspec_cli.recipe.keys.training import SchedulerSpec

Lab = Callable[..., SitesLab]
AUTO = {"scheduler": SchedulerSpec(mode="auto")}


def taken(*sites: Site) -> list[int]:
    return sorted(p for site in sites for _, start, samples in site.took for p in range(start, start + samples))


def test_sites_end_with_the_same_weights_and_each_sample_is_taken_once(lab: Lab) -> None:
    trial = lab()
    first, second = trial.run_all()
    assert torch.equal(first.weights, second.weights)
    assert taken(first, second) == list(range(2 * BATCH * STEPS))
    rounds = first.events("exchange")
    assert [(event["round"], event["step"]) for event in rounds[1:]] == [
        (1, 6),
        (2, 10),
        (3, 14),
        (4, 18),
        (5, 22),
        (6, 24),
    ]
    assert all(event["sites"] == [0, 1] for event in rounds[1:])


def test_shared_weights_move_towards_what_sites_have_learned(lab: Lab) -> None:
    """The outer gradient has the right sign."""
    trial = lab(outer_momentum=0.0, outer_lr=1.0)
    start = torch.cat([begun(trial.values)] * 4)
    first, _ = trial.run_all()
    learned = first.saves[4][1]
    locally = torch.cat([learned[share.name] for share in first.shares]) - start
    assert torch.cosine_similarity(first.weights - start, locally, dim=0) > 0.3


def test_a_killed_site_is_not_waited_for_and_can_return(lab: Lab) -> None:
    trial = lab(sites=3)

    def wait_for_return(_site: Site) -> None:
        meeting = trial.point._meeting
        wait_until(lambda: meeting.ready.get(1) == meeting.state.round)

    trial.acts |= {(1, 9): kill, (0, 16): wait_for_return, (2, 16): wait_for_return}
    trial.open()
    first, killed, third = (trial.start(number) for number in range(3))
    trial.wait(killed)
    wait_until(lambda: "site 1 is lost" in trial.said)
    back = trial.start(1, killed.saves[4])
    trial.wait(first, third, back)
    trial.close()
    assert torch.equal(first.weights, third.weights) and torch.equal(first.weights, back.weights)
    assert [event["group"] for event in first.events("recovery")] == [1, 1]
    assert [event["change"] for event in first.events("recovery")] == ["site_left", "site_joined"]
    merged_at = max(r["round"] for r in first.events("exchange") if 1 in r["sites"] and r["step"] <= 10) * 4
    merged = [took for took in killed.took if took[0] < merged_at]
    positions = sorted([*taken(first, third, back), *(p for _, s, n in merged for p in range(s, s + n))])
    assert positions == list(range(len(positions))), "no sample is lost or repeated"


def test_each_site_continues_from_the_shared_weights_and_its_unsent_work(lab: Lab) -> None:
    """Sums are applied immediately here, so that only the loss of the 16-bit encoding is unsent."""
    for site in lab(interval_steps=4, fragments=1, delay_steps=0, format="bf16").run_all():
        _, weights, kept = site.saves[5]
        shared = [tensor for name, tensor in kept.items() if ".shared." in name]
        [(start, samples)] = [took[1:] for took in site.took if took[0] == 4]
        with torch.no_grad():
            for share, tensor in zip(site.shares, shared, strict=True):
                share.local.copy_(tensor)
            for position in range(start, start + samples):
                site._learn(position)
        for share in site.shares:
            assert torch.allclose(share.local, weights[share.name], atol=2e-3)


@pytest.mark.slow
def test_a_run_that_is_stopped_everywhere_ends_with_the_same_bits(lab: Lab) -> None:
    whole, _ = lab("whole").run_all()
    for first_stop, second_stop in ((9, 12), (13, 11)):
        again = stop_all_and_resume(lab(f"stopped{first_stop}"), first_stop, second_stop)
        assert torch.equal(again[0].weights, whole.weights) and torch.equal(again[1].weights, whole.weights)


def stop_all_and_resume(trial: SitesLab, first_stop: int, second_stop: int) -> list[Site]:
    """Kill both sites at steps of theirs, end the meeting, and restart everything."""
    trial.acts |= {(0, first_stop): kill, (1, second_stop): kill}
    trial.return_s, trial.settings = 600.0, replace(trial.settings, quorum=2)  # no site is left out meanwhile
    trial.open()
    sites = [trial.start(number) for number in range(2)]
    trial.wait(sites[0])
    trial.close()
    sites[1].stop.requested = True
    trial.wait(sites[1])
    trial.acts.clear()  # it may have stopped before it was killed
    trial.open()
    again = [trial.start(site.number, site.saves[max(site.saves)]) for site in sites]
    trial.wait(*again)
    trial.close()
    return again


@pytest.mark.slow
def test_a_site_with_half_the_speed_takes_fewer_samples(lab: Lab) -> None:
    trial = lab()
    trial.sections = AUTO
    trial.compute_s = {0: 0.1, 1: 0.2}
    first, second = trial.run_all()
    assert torch.equal(first.weights, second.weights)
    assert first.took[-1][2] == BATCH and second.took[-1][2] < BATCH


def test_untrusted_clients_are_refused_and_the_run_continues(lab: Lab) -> None:
    trial = lab()

    def attack(site: Site) -> None:
        for content in (b"", b"\x16\x03\x01" + bytes(200), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", trial.port), 5) as client:
                client.sendall(content)

    trial.acts[0, 5] = attack
    first, second = trial.run_all()
    assert torch.equal(first.weights, second.weights)
    assert "connection from" in trial.said and all(len(e["sites"]) == 2 for e in first.events("exchange")[1:])


def test_another_secret_is_refused(lab: Lab, tmp_path: Path) -> None:
    trial = lab()
    trial.open()
    trial.start(0)
    other = lab("other")
    other.port = trial.port
    intruder = other.start(1)
    wait_until(lambda: "HandshakeError" in trial.said)
    wait_until(lambda: intruder.coordinator._link.trouble)


def test_a_flipped_bit_of_the_shared_weights_is_found(lab: Lab) -> None:
    trial = lab()

    def flip(site: Site) -> None:
        site.coordinator._outer.shares[0].shared[3] += 1e-6

    trial.acts[1, 9] = flip
    with pytest.raises(Exception, match="sites 0, 1 differ"):
        trial.run_all()


def test_another_recipe_is_refused(lab: Lab) -> None:
    trial = lab()
    trial.open()
    trial.settings = type(trial.settings)(**{**vars(trial.settings), "outer_lr": 0.5})
    site = trial.start(1)
    site.thread.join(PATIENCE_S)
    assert "recipe" in str(site.error)
