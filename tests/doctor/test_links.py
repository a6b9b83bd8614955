from __future__ import annotations

from itertools import combinations
from typing import Any

from trainspec_cli.doctor.links import judge_links


def measured(hosts: str, slow: dict[str, float]) -> dict[str, Any]:
    """Pairs of one-letter hosts at 1 GB/s, but those of `slow`."""
    pairs = []
    for low, high in combinations(hosts, 2):
        rate = slow.get(low + high, 1e9)
        sizes = [{"bytes": 4096, "seconds": 8e-5, "bytes_per_s": 4096 / 8e-5}]
        pairs.append({"hosts": [low, high], "bytes_per_s": rate, "sizes": sizes})
    return {"all_reduce": [], "pairs": pairs}


def warnings(hosts: str, slow: dict[str, float]) -> list[str]:
    return [check.found for check in judge_links(measured(hosts, slow)) if check.status == "warn"]


def test_links_alike_are_shown_with_rate_and_latency() -> None:
    checks = judge_links(measured("abc", {}))
    assert [check.status for check in checks] == ["ok"] * 3
    assert checks[0].found == "a - b: 1 GB/s, 4.00 KiB in 0.08 ms"


def test_a_bad_cable_names_its_host_though_most_pairs_are_slow() -> None:
    found = warnings("abc", {"ac": 0.1e9, "bc": 0.12e9})
    assert [words.partition(":")[0] for words in found[:2]] == ["a - c", "b - c"]
    assert found[2:] == ["c reaches nobody at more than 120 MB/s, 12% of the usual"]


def test_a_bad_way_between_two_hosts_blames_neither() -> None:
    (pair,) = warnings("abcd", {"bc": 0.3e9})
    assert pair == "b - c: 300 MB/s, 4.00 KiB in 0.08 ms: 30% of the usual"


def test_two_hosts_have_no_other_pair_to_be_held_against() -> None:
    assert warnings("ab", {"ab": 1e3}) == []


def test_one_process_has_no_links() -> None:
    assert judge_links(None) == []


def test_all_reduces_are_shown() -> None:
    (check,) = judge_links({"all_reduce": [{"bytes": 4096, "seconds": 0.001, "bus_bytes_per_s": 4e6}], "pairs": []})
    assert check.found == "4.00 KiB in 1.00 ms, 4 MB/s"
