"""A certificate: what was measured of the training spec's clauses, on which machine, under a digest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import number

Figure = Annotated[float, number(-math.inf, math.inf)] | str
"""A measured number, or a text; a certificate holds as text what is not finite."""
NOT_FINITE = ("inf", "-inf", "nan")


@dataclass(frozen=True)
class Finding:
    """One clause on one case."""

    clause: str
    case: str
    passed: bool
    figures: dict[str, Figure] = field(default_factory=dict)
    bound: float | None = None
    grade: str = ""
    """A, B or C of a clause that has levels, `-` below them; empty of any other."""
    machine_sha256: str = ""
    """Digest of the machine and the software that it was measured on, as the certificate describes them."""

    @property
    def measured(self) -> float:
        """The figure that is held against the bound, which is the first; 0 or 1 for clauses that allow no error."""
        first = next(iter(self.figures.values()), None)
        is_number = isinstance(first, float) or first in NOT_FINITE
        return float(first) if self.bound is not None and first is not None and is_number else float(not self.passed)


REFUSALS = "LEGAL-1"
"""The clause whose cases are layouts that validation refuses. None of them is run."""


@dataclass(frozen=True)
class ClauseSummary:
    """One clause, and the worst of its cases."""

    id: str
    level: str
    """MUST or SHOULD."""
    title: str
    cases: int
    failed: int
    worst: Figure | None
    """The worst case's figure; null where the clause was not measured."""
    bound: float | None
    worst_case: str | None = None
    grade: str = ""
    """The worst case's."""


@dataclass(frozen=True)
class NotOffered:
    """A case that the engine has declined: it is neither kept nor broken."""

    clause: str
    case: str
    reason: str


@dataclass(frozen=True)
class Signer:
    """Who vouches for a certificate."""

    public_key: str
    """`ssh-ed25519 ...`, as OpenSSH writes it."""
    fingerprint: str
    """`SHA256:...`, as `ssh-keygen -l` prints it."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Fields that schema 1 did not have are empty in a certificate of it."""

    schema: str
    engine: str = ""
    """The command of another engine, which the certificate speaks of; empty: trainspec's own."""
    spec_version: str
    spec_sha256: str = ""
    """Digest of the document that the clauses stand in."""
    date: str = ""
    """The day it was written, by UTC."""
    measured_since: str = ""
    """The day on which the first of its runs was made."""
    machine: Machine
    machine_id: str = ""
    """Tells the machine from others; empty where its system has no identity."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the software, by package."""
    processes: int = 0
    """The most processes of a case of the matrix."""
    features: tuple[str, ...] = ()
    """Kernels (`attention.math`) and formats (`fp8`) that the chip and its packages have in place of the defaults."""
    recipe: tuple[str, ...] = ()
    """The recipe whose model and loss were measured; empty: the families of the spec."""
    whole: bool
    """True if every case that belongs to the spec was measured, so that the verdict speaks of the spec."""
    verdict: str
    """`kept` where every MUST that was measured holds, else `broken`; `not offered` where all was declined."""
    clauses: tuple[ClauseSummary, ...]
    findings: tuple[Finding, ...]
    not_offered: tuple[NotOffered, ...] = ()
    """Cases that the engine has declined."""
    signer: Signer | None = None
    """None: nobody has signed it."""
    digest: str = ""
    """SHA-256 of everything else but the signature, as canonical JSON."""
    signature: str = ""
    """The signer's Ed25519 signature of everything else, as canonical JSON."""
