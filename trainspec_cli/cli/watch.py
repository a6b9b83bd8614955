"""`trainspec watch`: a running run, shown in another terminal."""

from __future__ import annotations

from trainspec_cli.cli.options import RunArgument


def watch(run: RunArgument) -> None:
    """Show a run that goes on, as the terminal does in which it was started. Ctrl-C leaves the run alone."""
    from trainspec_cli.session.console import PrintableConsole
    from trainspec_cli.session.runs.find import find_run
    from trainspec_cli.session.runs.follow import watch as follow

    console = PrintableConsole()
    try:
        console.report(f"the run is {follow(find_run(run), console)}")
    except KeyboardInterrupt:
        console.report("the run goes on")
