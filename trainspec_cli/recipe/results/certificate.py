"""A certificate: measurements of the training spec's clauses, and the machine on which they were made, with a
digest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import number

Figure = Annotated[float, number(-math.inf, math.inf)] | str
"""A measured number, or text. A certificate stores non-finite numbers as text."""
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
    """Digest of the machine and software used for the measurement, as described in the certificate."""

    @property
    def measured(self) -> float:
        """Return the value that is compared with the bound: the first one, or 0 or 1 for clauses that allow no
        error."""
        first = next(iter(self.figures.values()), None)
        is_number = isinstance(first, float) or first in NOT_FINITE
        return float(first) if self.bound is not None and first is not None and is_number else float(not self.passed)


REFUSALS = "LEGAL-1"
"""The clause whose cases are layouts that validation rejects; none of them is run."""


@dataclass(frozen=True)
class ClauseSummary:
    """One clause with its worst case."""

    id: str
    level: str
    """MUST or SHOULD."""
    title: str
    cases: int
    failed: int
    worst: Figure | None
    """The value for the worst case; null if the clause was not measured."""
    bound: float | None
    worst_case: str | None = None
    grade: str = ""
    """The grade of the worst case."""


@dataclass(frozen=True)
class NotOffered:
    """A case that the engine declined to run. It counts neither as kept nor as broken."""

    clause: str
    case: str
    reason: str


@dataclass(frozen=True)
class Signer:
    """The person who signs a certificate."""

    public_key: str
    """`ssh-ed25519 ...`, in OpenSSH's format."""
    fingerprint: str
    """`SHA256:...`, in the format of `ssh-keygen -l`."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Fields that schema 1 did not have are empty in a certificate with that schema."""

    schema: str
    engine: str = ""
    """The command of the certified engine if it is not trainspec's own; otherwise empty."""
    spec_version: str
    spec_sha256: str = ""
    """Digest of the document that contains the clauses."""
    date: str = ""
    """The date on which the certificate was written, in UTC."""
    measured_since: str = ""
    """The date of its first run."""
    machine: Machine
    machine_id: str = ""
    """Identifies the machine; empty if its operating system provides no identifier."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the software, by package."""
    processes: int = 0
    """Maximum number of processes in a case of the matrix."""
    features: tuple[str, ...] = ()
    """Non-default kernels (`attention.math`) and formats (`fp8`) that the chip and its packages support."""
    recipe: tuple[str, ...] = ()
    """The recipe whose model and loss were measured; if empty, the families of the spec were measured."""
    whole: bool
    """True if every case in the spec was measured; the verdict then covers the complete spec."""
    verdict: str
    """`kept` if every measured MUST is fulfilled, otherwise `broken`; `not offered` if all cases were declined."""
    clauses: tuple[ClauseSummary, ...]
    findings: tuple[Finding, ...]
    not_offered: tuple[NotOffered, ...] = ()
    """Cases that the engine declined."""
    signer: Signer | None = None
    """None if the certificate is not signed."""
    digest: str = ""
    """SHA-256 of everything except the signature, as canonical JSON."""
    signature: str = ""
    """The signer's Ed25519 signature of everything else, as canonical JSON."""
