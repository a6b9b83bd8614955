"""Start and supervise training commands of users."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "run": Command(
            "train",
            "run your own training command unchanged, with restarts, hang detection and a report",
            takes_command=True,
        ),
    },
    parts={
        "run_kinds": "trainspec_cli.wings.own_script.launching:RUNS_OF_COMMANDS",
        "job_kinds": "trainspec_cli.wings.own_script.start:JOBS",
        "prepare_command": "trainspec_cli.wings.own_script.submit:prepare_command",
        "attach": "trainspec_cli.wings.own_script.attachment.run:connect",
    },
)
