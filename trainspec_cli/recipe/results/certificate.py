"""A certificate: the measurements of the training spec's clauses, on which machine, under a digest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import number

Figure = Annotated[float, number(-math.inf, math.inf)] | str
"""A measured number, or text; a certificate stores a number that is not finite as text."""
NOT_FINITE = ("inf", "-inf", "nan")


@dataclass(frozen=True)
class Finding:
    """The result of one clause on one case."""

    clause: str
    case: str
    passed: bool
    figures: dict[str, Figure] = field(default_factory=dict)
    bound: float | None = None
    grade: str = ""
    """A, B or C for a clause with levels, `-` below them; empty for other clauses."""
    machine_sha256: str = ""
    """Digest of the machine and the software of the measurement, as the certificate describes them."""

    @property
    def measured(self) -> float:
        """Return the figure that is compared with the bound: the first one; 0 or 1 for clauses that allow no error."""
        first = next(iter(self.figures.values()), None)
        is_number = isinstance(first, float) or first in NOT_FINITE
        return float(first) if self.bound is not None and first is not None and is_number else float(not self.passed)


REFUSALS = "LEGAL-1"
"""The clause whose cases are layouts that validation refuses. None of them is run."""


@dataclass(frozen=True)
class ClauseSummary:
    """One clause, and its worst case."""

    id: str
    level: str
    """MUST or SHOULD."""
    title: str
    cases: int
    failed: int
    worst: Figure | None
    """The worst case's figure; null if the clause was not measured."""
    bound: float | None
    worst_case: str | None = None
    grade: str = ""
    """The worst case's grade."""


@dataclass(frozen=True)
class NotOffered:
    """A case that the engine has declined: it counts neither as kept nor as broken."""

    clause: str
    case: str
    reason: str


@dataclass(frozen=True)
class Signer:
    """The person who signs a certificate."""

    public_key: str
    """`ssh-ed25519 ...`, as OpenSSH writes it."""
    fingerprint: str
    """`SHA256:...`, as `ssh-keygen -l` prints it."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Fields that schema 1 did not have are empty in a certificate with that schema."""

    schema: str
    engine: str = ""
    """The command of the other engine that the certificate is about; empty: trainspec's own engine."""
    spec_version: str
    spec_sha256: str = ""
    """Digest of the document that contains the clauses."""
    date: str = ""
    """The day it was written, in UTC."""
    measured_since: str = ""
    """The day on which the first of its runs was made."""
    machine: Machine
    machine_id: str = ""
    """Identifies the machine; empty if its system has no identity."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the software, by package."""
    processes: int = 0
    """The most processes in a case of the matrix."""
    features: tuple[str, ...] = ()
    """Kernels (`attention.math`) and formats (`fp8`) that the chip and its packages have instead of the defaults."""
    recipe: tuple[str, ...] = ()
    """The recipe whose model and loss were measured; empty: the families of the spec."""
    whole: bool
    """True if every case of the spec was measured, so that the verdict is about the whole spec."""
    verdict: str
    """`kept` if every measured MUST holds, else `broken`; `not offered` if all cases were declined."""
    clauses: tuple[ClauseSummary, ...]
    findings: tuple[Finding, ...]
    not_offered: tuple[NotOffered, ...] = ()
    """Cases that the engine has declined."""
    signer: Signer | None = None
    """None: it is not signed."""
    digest: str = ""
    """SHA-256 of everything except the signature, as canonical JSON."""
    signature: str = ""
    """The signer's Ed25519 signature of everything else, as canonical JSON."""
