"""`trainspec watch`: show a run in progress in another terminal."""

from __future__ import annotations

from trainspec_cli.cli.options import RunArgument


def watch(run: RunArgument) -> None:
    """Show a run in progress in the same way as the terminal that launched it. Ctrl-C does not affect the run."""
    from trainspec_cli.reporter.console import PrintableConsole
    from trainspec_cli.session.runs.find import find_run
    from trainspec_cli.session.runs.follow import watch as follow

    console = PrintableConsole()
    try:
        console.report(f"the run is {follow(find_run(run), console)}")
    except KeyboardInterrupt:
        console.report("the run continues")
