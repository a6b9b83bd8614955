"""What a plan says of its run among far-apart sites: the schedule of exchanges, and what all sites have to agree on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from trainspec_cli.recipe.canonical import canonical_json, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.sites.decisions.meeting import MeetingRules
from trainspec_cli.wings.sites.decisions.schedule import SiteSchedule


def schedule_of(plan: Plan) -> SiteSchedule:
    sites = plan.spec.resilience.sites
    return SiteSchedule(plan.total_steps, sites.interval_steps, sites.fragments, sites.delay_steps)


def rules_of(plan: Plan) -> MeetingRules:
    resilience = plan.spec.resilience
    sites = resilience.sites
    return MeetingRules(
        sites.count, sites.quorum, sites.grace_s, plan.spec.run.node_timeout_s, plan.spec.scheduler.change
    )


def agreement_of(plan: Plan) -> str:
    """Return a digest of what all sites have to agree on: the model, the data, the layout, the steps, the optimizers
    and what is exchanged. Batches, machines and folders may differ."""
    spec = plan.spec
    shared = replace(spec.resilience.sites, site=None, endpoint=None, listen=None, secret=None)
    sites = replace(shared, link_gbit_s=None, link_delay_s=0.0)
    agreed = {
        "model": to_plain(spec.model),
        "seq_len": spec.data.seq_len,
        "lora": to_plain(spec.lora),
        "layout": to_plain(plan.layout),
        "optim": to_plain(spec.optim),
        "steps": plan.total_steps,
        "seed": spec.train.seed,
        "sites": to_plain(sites),
    }
    return hashlib.sha256(canonical_json(agreed).encode()).hexdigest()
