"""One plane of several is cut under a job, and heals: `PYTHONPATH=tests python tests/bench/planes.py`.

Two emulated hosts sum 16 MiB again and again over planes of 40 Mbit/s (`lab.planes`). Prints the bytes that each plane
carried and the job's throughput before, while one plane is down, and after it is up again, relative to before; and the
longest pause. Needs root.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise

from lab.planes import Job, Planes, lacking, open_job

MESSAGE_BYTES = 2**24
CUT = 2


@dataclass(frozen=True)
class Phase:
    name: str
    sums_per_s: float
    longest_s: float
    """Between two sums."""
    carried: tuple[int, ...]
    """Bytes by plane."""


def watch(job: Job, planes: Planes, name: str, sums: int, began_s: float) -> tuple[Phase, float]:
    """Return the phase of so many sums from `began_s` on, and its end."""
    before, ends = planes.carried_bytes(), [began_s]
    ends += [job.next_end_s() for _ in range(sums)]
    carried = tuple(now - then for now, then in zip(planes.carried_bytes(), before, strict=True))
    gaps_s = [later - earlier for earlier, later in pairwise(ends)]
    return Phase(name, sums / (ends[-1] - ends[0]), max(gaps_s), carried), ends[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planes", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=40.0, help="of a port on one plane")
    parser.add_argument("--sums", type=int, default=20, help="in each phase")
    options = parser.parse_args()
    if why := lacking():
        raise SystemExit(why)
    phases = []
    with open_job(2, options.planes, options.mbit, MESSAGE_BYTES) as (planes, job):
        for _ in range(3):  # windows open
            end_s = job.next_end_s()
        for name in ("all planes", "one plane cut", "comes back", "healed"):
            if name == "one plane cut":
                planes.cut(CUT)
            elif name == "comes back":
                planes.heal(CUT)
            phase, end_s = watch(job, planes, name, options.sums, end_s)
            phases.append(phase)
    whole = phases[0]
    for phase in phases:
        shares = " ".join(f"{100 * size / sum(phase.carried):3.0f}%" for size in phase.carried)
        rate = MESSAGE_BYTES * 8 / 1e6 * phase.sums_per_s
        ratio = phase.sums_per_s / whole.sums_per_s
        print(f"{phase.name:14} {rate:6.1f} Mbit/s {ratio:6.3f}  longest sum {phase.longest_s:5.2f} s  planes {shares}")
    cut, left = phases[1], 1 - 1 / options.planes
    cut_s = options.sums / cut.sums_per_s
    steady = (options.sums - 1) / (cut_s - cut.longest_s)
    kept, kept_later = (100 * rate / whole.sums_per_s / left for rate in (cut.sums_per_s, steady))
    about = f"{kept:.1f}% of (1 - 1/planes) with the sum that the cut fell into, {kept_later:.1f}% without it"
    print(f"with one plane of {options.planes} cut: {about}")


if __name__ == "__main__":
    main()
