"""`trainspec certify`: measure every clause of the open training spec on the chips at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.certify import keys
from trainspec_cli.certify.certificate import Terms
from trainspec_cli.certify.verify import Requirements
from trainspec_cli.certify.verify import verify as read_verified
from trainspec_cli.cli.certifying import certify_here, certify_other, wanted_here, wanted_of_engine
from trainspec_cli.cli.options import AsJson, Html, page_origin, write_page
from trainspec_cli.errors import Problem, RecipeError, WorkerError
from trainspec_cli.launcher.job.identity import machine_identity
from trainspec_cli.reporter.certificate import describe_trust, render_certificate
from trainspec_cli.reporter.certificate_page import render_certificate_page
from trainspec_cli.session.console import PrintableConsole, make_console
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.results.certificate import Certificate

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[recipe=NAME|key=value]",
        help="Measure the model and the loss of this recipe alone, such as one's own block.",
        show_default=False,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="A clause (NUM-1), a family (dense) or a case; * stands for anything. May be given again."),
]
Processes = Annotated[
    int | None,
    typer.Option(help="At most so many; as many as there are GPUs, else 4. More than there are run on the CPU.", min=2),
]
Verify = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Compute every statement of a certificate again, check its signature, and print it."
    ),
]
OtherEngine = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND", help="Judge another engine, which this command starts (docs/spec/engine-protocol.md)."
    ),
]
EngineSeconds = Annotated[float, typer.Option(metavar="S", min=1, help="The most time that it has for a run.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate to this file.")]
Listed = Annotated[bool, typer.Option("--list", help="Name the cases, and run none.")]
Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="FOLDER", help="Keep the runs here, and go on where an earlier start was stopped."),
]
MakeKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Make a key to sign with: FILE, private to you, and FILE.pub.")
]
Sign = Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the certificate with this private key.")]
SignedBy = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="With --verify: refuse what is not signed by this public key (FILE.pub, SHA256:...).",
    ),
]
OnMachine = Annotated[
    str | None,
    typer.Option(
        "--machine", metavar="ID", help="With --verify: refuse what is of another machine; `here` is this one."
    ),
]


def certify(
    arguments: Arguments = None,
    only: Only = None,
    processes: Processes = None,
    folder: Folder = None,
    output: Output = None,
    sign: Sign = None,
    verify: Verify = None,
    signed_by: SignedBy = None,
    machine: OnMachine = None,
    make_key: MakeKey = None,
    engine: OtherEngine = None,
    engine_seconds: EngineSeconds = 600.0,
    html: Html = None,
    listed: Listed = False,
    as_json: AsJson = False,
) -> int:
    """Hold this engine, on these chips, against the open training spec: gradients, losses, resume, resharding.

    Every case is a real torchrun job of small models; given a recipe, of its model and its loss in every layout that
    they allow. Exits with 5 where a MUST is broken.
    """
    console = make_console(as_json=as_json)
    if make_key is not None:
        return _make_key(make_key, as_json=as_json)
    if verify is not None:
        made = {"--sign": sign, "--output": output, "--only": only, "--dir": folder, "--engine": engine}
        _refuse_with_verify(made)
        certificate = read_verified(verify, _asked(signed_by, machine))
        return _show(certificate, console, html, as_json=as_json, is_verified=True)
    _refuse_without_verify({"--signed-by": signed_by, "--machine": machine})
    key = keys.read_key(sign) if sign is not None else None
    for option, file in {"--output": output, "--html": html}.items():
        if file is not None:
            _check_writable(option, file)
    terms = Terms(machine_id=machine_identity())
    if engine is not None:
        if arguments:
            message = "another engine is asked for a model of trainspec's own choice, and a recipe was given"
            raise RecipeError(Problem("usage", message, "--engine", "leave out the recipe, or --engine"))
        other = wanted_of_engine(engine, only or [], processes, engine_seconds)
        if listed:
            return _list(other.cases)
        certificate = certify_other(other, folder, terms, key)
    else:
        wanted = wanted_here(only or [], processes, arguments or [], console)
        if listed:
            return _list(wanted.cases)
        certificate = certify_here(wanted, folder, terms, key)
    if output is not None:
        output.write_text(json_text(to_plain(certificate)) + "\n", encoding="utf-8")
    return _show(certificate, console, html, as_json=as_json)


# Keys, and certificates of others


def _make_key(file: Path, *, as_json: bool) -> int:
    signer = keys.make_key(file)
    if as_json:
        print(json_text(to_plain(signer)))
    else:
        print(f"{signer.public_key}\n{signer.fingerprint}\n\nprivate key  {file}\npublic key   {file}{keys.SUFFIX}")
    return 0


def _asked(signed_by: str | None, machine: str | None) -> Requirements:
    fingerprint = keys.read_fingerprint(signed_by) if signed_by is not None else ""
    return Requirements(fingerprint, machine_identity() if machine == "here" else machine or "")


def _refuse_with_verify(given: Mapping[str, object]) -> None:
    if named := [option for option, value in given.items() if value]:
        message = f"{named[0]} does not go with --verify, which reads a certificate that was made before"
        raise RecipeError(Problem("usage", message, named[0], "give one of the two"))


def _refuse_without_verify(given: Mapping[str, object]) -> None:
    if named := [option for option, value in given.items() if value is not None]:
        message = f"{named[0]} says what a certificate has to be, and none is given"
        raise RecipeError(Problem("usage", message, named[0], f"type --verify FILE {named[0]} ..."))


def _list(cases: Sequence[str]) -> int:
    print("\n".join(cases))
    return 0


def _check_writable(option: str, output: Path) -> None:
    """Check the folder before minutes of runs, not after them."""
    try:
        with output.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        message = f"{option} {output} cannot be written: {error.strerror}"
        raise RecipeError(Problem("output_exists", message, hint="choose a file in a folder that is there")) from error


def _show(
    certificate: Certificate,
    console: PrintableConsole,
    html: Path | None,
    *,
    as_json: bool,
    is_verified: bool = False,
) -> int:
    if html is not None:
        write_page(html, render_certificate_page(certificate, page_origin()))
    if as_json:
        found = {"verification": {"signed": certificate.signer is not None, "statement": describe_trust(certificate)}}
        print(json_text((found if is_verified else {}) | to_plain(certificate)))
    else:
        console.print(render_certificate(certificate))
    return WorkerError.exit_code if certificate.verdict == "broken" else 0
