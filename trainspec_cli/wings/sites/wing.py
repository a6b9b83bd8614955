"""Train one model at several distant sites connected by slow links (`resilience=sites`)."""

from trainspec_cli.core.wings import Wing

WING = Wing(
    parts={
        "rules": "trainspec_cli.wings.sites.rules:SITES_RULES",
        "packages": "trainspec_cli.wings.sites.rules:PACKAGES",
        "check_start": "trainspec_cli.wings.sites.rules:check_start",
        "kept_bytes": "trainspec_cli.wings.sites.outlook:KEPT_BYTES",
        "plan_sections": "trainspec_cli.wings.sites.outlook:plan_sites",
        "event_types": "trainspec_cli.wings.sites.events:EVENT_TYPES",
        "run_services": "trainspec_cli.wings.sites.meeting_point:serve_site",
        "coordinator": "trainspec_cli.wings.sites.engine.far_sites:FarSites",
    },
)
