"""Proposals of the supervisor to the workers: another layout that their run would be faster in.

It writes RUN/proposal.json, which rank 0 looks for; the ranks agree at which step they take it up.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.records import Count, Seconds
from trainspec_cli.recipe.results.plan import LayoutProposal
from trainspec_cli.run.folder.event_types.decisions import WrittenLayout
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.versioned import read_versioned_record, write_versioned


@dataclass(frozen=True, kw_only=True)
class ProposalRecord:
    """proposal.json: the newest proposal. `LayoutProposal` says what the fields mean that have the same names."""

    number: Count
    """Proposals of a run are numbered from 1, over all of its starts."""
    before: WrittenLayout
    """It is meant for a run in this layout, and void in any other."""
    layout: WrittenLayout
    micro_batch_size: Count
    grad_accum_steps: Count
    largest_micro_batch_size: Count
    largest_stage_layers: Count | None
    before_s: Seconds
    """A step takes so long as it is, measured."""
    expected_s: Seconds
    """As it is expected to."""
    reason: str

    @property
    def proposal(self) -> LayoutProposal:
        return LayoutProposal(
            layout=self.layout,
            micro_batch_size=self.micro_batch_size,
            grad_accum_steps=self.grad_accum_steps,
            largest_micro_batch_size=self.largest_micro_batch_size,
            largest_stage_layers=self.largest_stage_layers,
            before_s=self.before_s,
            expected_s=self.expected_s,
            reason=self.reason,
        )


def write_proposal(run: RunDir, record: ProposalRecord) -> None:
    write_versioned(run.proposal_json, to_plain(record))


def read_proposal(run: RunDir) -> ProposalRecord | None:
    """Return the newest proposal; None where there is none. Raises UnreadableFileError where it is damaged or of a
    later version."""
    path = run.proposal_json
    return read_versioned_record(path, ProposalRecord, "proposal of a layout") if path.exists() else None
