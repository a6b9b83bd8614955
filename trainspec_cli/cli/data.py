"""`trainspec data prepare | info`: prepare a run's token shards, and inspect a folder of token shards."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainspec_cli.cli.options import check_new, not_empty
from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.core.printable import format_bytes, format_count
from trainspec_cli.data.corpus.prepare import prepare as prepare_data
from trainspec_cli.data.corpus.prepare import prepare_into
from trainspec_cli.data.corpus.shards import ShardManifest, SplitSummary, TokenFolder
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.data.corpus.tokenise import OnProgress
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import SAMPLE_SOURCES, DataSpec, Documents, SampleSource, TokenizerSpec
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.live import showing_progress
from trainspec_cli.session.recipe.load import load

app = typer.Typer(add_completion=False, help="Turn text into token shards, and inspect them.", no_args_is_help=True)

OPTIONS = {
    "data.path": "--path",
    "data.text_field": "--text-field",
    "data.heldout_fraction": "--heldout-fraction",
    "data.max_bytes": "--max-bytes",
    "data.chat_template": "--chat-template",
    "data.tokenizer.vocab_size": "--vocab-size",
    "data.tokenizer.path": "--tokenizer",
    "data.tokenizer.end_of_document": "--end-of-document",
}
"""Maps recipe keys to this command's options."""


Source = Literal[Documents, SampleSource]
READY: dict[str, str] = {
    "tokens": "this folder is already prepared",
    "nanogpt": "such files are read in place",
    "megatron": "such files are read in place",
    "phantom": "phantoms are generated during training",
    "images": "images are read as they are",
    "volumes": "volumes are read as they are",
}
"""Reasons why a source needs no preparation, by source."""


@app.command()
def prepare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[recipe=NAME|key=value]...",
            help="A recipe: prepare all its data, such as a mixture, in the cache.",
        ),
    ] = None,
    source: Annotated[
        Source | None, typer.Option(help="One document is a file (text), a line (jsonl), or a row (parquet, arrow).")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to make.")] = None,
    path: Annotated[str | None, typer.Option(help="File, folder or quoted glob.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of the tokenizer to train.")] = 4096,
    tokenizer: Annotated[str | None, typer.Option(help="Use this tokenizer.json instead of training one.")] = None,
    end_of_document: Annotated[
        str | None, typer.Option(help="The token of an existing tokenizer that ends a document.")
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field of each JSON line, or column of a table, that contains the text.")
    ] = "text",
    chat_template: Annotated[str | None, typer.Option(help="chatml, or a Jinja template file (chat only).")] = None,
    heldout_fraction: Annotated[float, typer.Option(help="Fraction of the documents to hold out.")] = 0.02,
    max_bytes: Annotated[int | None, typer.Option(help="Read at most this many bytes of text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Read text, train a tokenizer on it (or use an existing one), and write token shards: from one source to a folder,
    or for all data of a recipe."""
    # With a recipe, the data goes to the cache, under the names that `launch` uses.
    if arguments:
        options = {"--source": source, "--output": output, "--path": path}
        given = [name for name, value in options.items() if value is not None]
        if given:
            message = f"a recipe determines what is read and where it goes; leave out {' and '.join(given)}"
            raise RecipeError(Problem("contradiction", message, given[0], "set data.path=... instead"))
        prepare_recipe(arguments, as_json)
        return
    if source in READY:
        _tell_ready(source, READY[source], as_json)
        return
    if source is None or output is None:
        raise typer.BadParameter("specify --source and --output, or a recipe", param_hint="--source")
    data = DataSpec(
        seq_len=1,  # the shards do not depend on seq_len
        source=source,
        path=path,
        text_field=text_field,
        chat_template=chat_template,
        tokenizer=TokenizerSpec(vocab_size, tokenizer, end_of_document),
        heldout_fraction=heldout_fraction,
        max_bytes=max_bytes,
    )
    check_new(output)
    try:
        with _progress() as on_progress:
            prepare_into(data, output, on_progress)
    except FileExistsError as error:  # another process has written to the folder in the meantime
        raise not_empty(output) from error
    except TrainspecError as error:  # recipe keys in the error become this command's options
        raise type(error)([_as_option(problem) for problem in error.problems]) from error
    _print_folder(output, TokenFolder.open(output).manifest, as_json)


def prepare_recipe(arguments: list[str], as_json: bool) -> None:
    """Prepare a recipe's data as `launch` would, in the cache, where `launch` finds it."""
    data = load(arguments).spec.data
    if data.source in SAMPLE_SOURCES:
        _tell_ready(data.source, READY[data.source], as_json)
        return
    with _progress() as on_progress:
        folder = prepare_data(data, on_progress)
    collection = Collection.open(folder)
    # If there is only one source, it has no name.
    found = {name or data.source: part.folder for name, part in collection.parts.items()}
    found |= collection.validation
    if as_json:
        parts = {name: {"path": str(tokens.path), **asdict(tokens.manifest)} for name, tokens in found.items()}
        print(json_text({"path": str(folder), "parts": parts}))
        return
    for name, tokens in found.items():
        print(f"{name:<16} {_describe_split(tokens.manifest.train)}; {tokens.path}")


def _tell_ready(source: str, why: str, as_json: bool) -> None:
    if as_json:
        print(json_text({"path": None, "nothing_to_prepare": why}))
    else:
        print(f"nothing to prepare: {why}; train with data={source}")


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(help="A folder written by `data prepare`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its digest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show the content of a token folder, and check that it is complete."""
    tokens = TokenFolder.open(folder)
    if verify:
        tokens.verify()
    _print_folder(folder, tokens.manifest, as_json)


def _as_option(problem: Problem) -> Problem:
    hint = problem.hint
    for key, option in OPTIONS.items():
        hint = hint.replace(f"{key}=", f"{option} ").replace(key, option)
    return replace(problem, path=OPTIONS.get(problem.path, problem.path), hint=hint)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show a progress bar on stderr, so that with `--json` stdout contains only JSON."""
    console = PrintableConsole(stderr=True)
    # Not in a log, where one line per percent would hide the result.
    if not console.is_terminal:
        yield lambda phase, done, rows: None
        return
    with showing_progress(console) as on_progress:
        yield on_progress


def _print_folder(folder: Path, manifest: ShardManifest, as_json: bool) -> None:
    if as_json:
        print(json_text({"path": str(folder), **asdict(manifest)}))
        return
    for name, value in _rows(manifest).items():
        print(f"{name:<16} {value}")
    where = f"data=tokens data.path={shlex.quote(str(folder))} model.vocab_size={manifest.vocab_size}"
    print(f"\nto train on it: trainspec launch recipe=quickstart {where}")


def _rows(manifest: ShardManifest) -> dict[str, str]:
    asked = manifest.vocab_size_asked
    fewer = f" (the text is too small for the {asked} tokens requested)" if manifest.vocab_size < asked else ""
    xz = manifest.xz_bits_per_byte
    why = "not defined for conversations" if manifest.learns_parts else "this Python has no lzma"
    of_chats = {"format": str(manifest.source["format"])} if "format" in manifest.source else {}
    return {
        **of_chats,
        "train": _describe_split(manifest.train),
        "held out": _describe_split(manifest.heldout),
        "bytes per token": f"{manifest.bytes_per_token:.3f}",
        "vocabulary": f"{manifest.vocab_size}{fewer}",
        "xz on held out": f"{xz:.3f} bits per byte" if xz is not None else f"unknown: {why}",
    }


def _describe_split(split: SplitSummary) -> str:
    documents = f"{split.documents:,} document{'s' * (split.documents != 1)}"
    return f"{documents}, {format_count(split.tokens)} tokens, {format_bytes(split.bytes)}"
