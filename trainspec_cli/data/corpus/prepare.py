"""Prepare the data of a DataSpec as a token folder, which is created once and cached."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.node import cache_dir, make_cache
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus import token_files
from trainspec_cli.data.corpus.bpe import MIN_VOCAB_SIZE, load
from trainspec_cli.data.corpus.chat import ChatFormat, describe
from trainspec_cli.data.corpus.rows import Packed
from trainspec_cli.data.corpus.shards import SCHEMA, TOKENIZER_FILE, TokenFolder, publishing
from trainspec_cli.data.corpus.source_files import find_files
from trainspec_cli.data.corpus.sources import READ_HERE, documents, write_collection
from trainspec_cli.data.corpus.tokenise import OnProgress, tokens_before_reply, write_tokens
from trainspec_cli.data.corpus.user_code import source_facts, source_files, tokenizer_sha256, write_own
from trainspec_cli.recipe.keys.run import DataSpec


def prepare(data: DataSpec, on_progress: OnProgress | None = None) -> Path:
    """Return the folder from which to read `data`: a token folder, or a collection of several (see sources.py).

    Raises RecipeError (no such file, malformed text, too little text for one sample of `seq_len`, or parts with
    different tokenizers) and MachineError (disk full, damaged folder). Several processes may prepare the same data at
    the same time."""
    parts = {name: _prepare_part(data, "mixture", name, on_progress) for name in data.parts}
    if data.source != "mixture" and not data.validation:
        return parts[""]
    # Validation text uses the tokenizer of the first part, because it must consist of tokens that the model knows.
    tokenizer = TokenFolder.open(next(iter(parts.values()))).path / TOKENIZER_FILE
    # A tokenizer file named by the recipe is kept, because conversations need the chat template in its folder.
    is_named = data.tokenizer.path is not None or not tokenizer.is_file()
    same = data if is_named else replace(data, tokenizer=replace(data.tokenizer, path=str(tokenizer)))
    validation = {name: _prepare_part(same, "validation", name, on_progress) for name in data.validation}
    return write_collection({name: (parts[name], part.weight) for name, part in data.parts.items()}, validation)


def _prepare_part(data: DataSpec, group: str, name: str, on_progress: OnProgress | None) -> Path:
    """Return the token folder of one source: the user's own folder for `tokens`, otherwise one in the cache, which is
    created if it is missing. Problems in user-defined code are reported at the key that names the code."""
    part = data.parts[name] if group == "mixture" else data.validation[name]
    try:
        one = data.with_part(part)
        if one.source == "tokens":
            folder = _token_folder(one)
        else:
            check_options(one)
            folder = cached_folder(one, source_files(one) if one.is_own else find_files(one))
            if not folder.exists():
                make_cache()
                with suppress(FileExistsError):  # another process created the same folder in the meantime
                    prepare_into(one, folder, on_progress)
        _check_length(TokenFolder.open(folder), one)
        return folder
    except RecipeError as error:
        if not name or not part.is_own:
            raise
        problems = []
        for problem in error.problems:
            if problem.path in ("data.source", "data.options", "data.text_field"):
                key = f"data.{group}.{name}{problem.path.removeprefix('data')}"
                message = problem.message.replace(f"`{problem.path}`", f"`{key}`")
                problem = replace(problem, path=key, message=message)
            problems.append(problem)
        raise RecipeError(problems) from error


# Prepared data in the cache. A folder's name is a digest of everything that its tokens depend on.


def cached_folder(data: DataSpec, files: list[Path]) -> Path:
    """Return the cache folder for `data`, read from `files` in their current state (path, size, modification time)."""
    import tokenizers

    spec = data.tokenizer
    tokenizer: list[object] = ["trained", spec.vocab_size]
    if spec.code:
        tokenizer = ["own", tokenizer_sha256(data)]
    elif spec.path is not None:
        content = expand(spec.path).read_bytes()
        tokenizer = ["given", hashlib.sha256(content).hexdigest(), spec.end_of_document]
    # The digest covers the files' state instead of their content, because hashing terabytes would take longer than
    # preparing them.
    stats = [(str(file.resolve()), file.stat()) for file in ([] if data.is_own else files)]
    facts = {
        "schema": SCHEMA,
        "tokenizers": tokenizers.__version__,
        "python": sys.version if data.source == "python_stdlib" else None,
        "source": source_facts(data) if data.is_own else data.source,
        "text_field": data.text_field if data.source in ("jsonl", "parquet", "arrow") else None,
        "heldout_fraction": data.heldout_fraction,
        "max_bytes": data.max_bytes,
        "tokenizer": tokenizer,
        **describe(data),
        "files": [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats],
    }
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    kind = "own" if data.is_own else data.source
    return cache_dir() / "tokens" / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def prepared_folder(data: DataSpec) -> Path | None:
    """Return the folder of a user-defined source if its documents are already in the cache, without running any
    code."""
    folder = cached_folder(data, source_files(data))
    return folder if folder.exists() else None


def prepare_into(data: DataSpec, folder: Path, on_progress: OnProgress | None = None) -> None:
    """Write `folder`, which must be missing or empty. Raises the same errors as `prepare`, and FileExistsError."""
    check_options(data)
    files = source_files(data) if data.is_own else find_files(data)
    with publishing(folder.expanduser().resolve()) as temporary:
        if data.is_own:
            report = on_progress or (lambda phase, done, rows: None)
            described: dict[str, str | int | None] = {"source": data.source, "max_bytes": data.max_bytes}
            write_own(data, temporary, lambda text, file: write_tokens(text, [file], temporary, report, described))
        elif data.source in token_files.SOURCES:
            token_files.write_foreign(data, files, temporary)
        else:
            write_tokens(data, files, temporary, on_progress or (lambda phase, done, rows: None))


def check_text(data: DataSpec, max_bytes: int) -> set[ChatFormat]:
    """Read the first `max_bytes` of each source's text, or check that its token folder is complete; return the formats
    of its conversations. Raises the same errors as `prepare`, but writes nothing."""
    formats: set[ChatFormat] = set()
    problems: list[Problem] = []
    for part in (*data.parts.values(), *data.validation.values()):
        one = data.with_part(part)
        try:
            if one.source == "tokens":
                _check_length(TokenFolder.open(_token_folder(one)), one)
            elif one.source in READ_HERE and one.source != "python_stdlib":
                check_options(one)
                # `validate` must answer quickly, and format mistakes show up in the first documents.
                limited = replace(one, max_bytes=min(max_bytes, one.max_bytes or max_bytes))
                formats |= _check_conversations(limited)
        except RecipeError as error:
            # A mistake in one source must not hide those in the others.
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return formats


def _check_conversations(data: DataSpec) -> set[ChatFormat]:
    """Read the documents of a source and return the formats of its conversations. Raises RecipeError if every reply
    starts beyond `data.seq_len`, provided that the tokenizer is known."""
    formats: set[ChatFormat] = set()
    has_file = data.source == "chat" and data.tokenizer.path is not None
    # A tokenizer that has not been trained yet is unknown here, so lengths cannot be checked.
    tokenizer = load(expand(data.tokenizer.path or "")) if has_file else None
    silenced: list[tuple[str, int]] = []
    for document in documents(data, find_files(data)):
        if document.conversation:
            formats.add(document.conversation.format)
        if document.conversation and tokenizer is not None:
            before = tokens_before_reply(document.conversation, tokenizer)
            if before is not None and before <= data.seq_len:
                tokenizer = None  # a single reply that starts within the length is enough
            elif before is not None:
                silenced.append((document.name, before))
    if silenced and tokenizer is not None:
        raise _all_silenced(data, len(silenced), silenced)
    return formats


def check_options(data: DataSpec) -> None:
    """Raise a RecipeError that lists all mistakes in the numeric options and the tokenizer file."""
    spec = data.tokenizer
    problems = []
    if not 0 < data.heldout_fraction < 1:
        got = f"heldout_fraction is {data.heldout_fraction:g}; it must be between 0 and 1, such as 0.02"
        problems.append(Problem("out_of_range", got, "data.heldout_fraction"))
    if data.max_bytes is not None and data.max_bytes <= 0:
        got = f"max_bytes is {data.max_bytes}; it must be positive, or null to read all"
        problems.append(Problem("out_of_range", got, "data.max_bytes"))
    if spec.is_trained and spec.vocab_size < MIN_VOCAB_SIZE:
        got = f"vocab_size is {spec.vocab_size}; a byte-level BPE needs at least {MIN_VOCAB_SIZE}"
        problems.append(Problem("out_of_range", got, "data.tokenizer.vocab_size"))
    if spec.path is not None and not expand(spec.path).is_file():
        got = f"{expand(spec.path).absolute()} does not exist"
        problems.append(Problem("missing_file", got, "data.tokenizer.path", "name a tokenizer.json"))
    if problems:
        raise RecipeError(problems)


def _token_folder(data: DataSpec) -> Path:
    if not data.path:
        hint = "set data.path=FOLDER, a folder written by `trainspec data prepare`"
        raise RecipeError(Problem("missing_file", "the source tokens needs a path", "data.path", hint))
    return expand(data.path)


def _check_length(folder: TokenFolder, data: DataSpec) -> None:
    """Check that there is at least one training sample. Held-out text may be shorter than a sample, because it is
    evaluated in padded windows."""
    seq_len = data.seq_len
    if folder.manifest.learns_parts:  # documents are packed into as many rows as they need
        rows = Packed(folder, "train", seq_len)
        if rows.is_empty:
            silenced: list[tuple[str, int]] = []
            if data.source == "chat":  # for a token folder, the origin of its text is unknown
                tokenizer = load(folder.path / TOKENIZER_FILE)
                for one in documents(data, find_files(data)):
                    before = tokens_before_reply(one.conversation, tokenizer) if one.conversation else None
                    if before is not None and before > seq_len:
                        silenced.append((one.name, before))
            raise _all_silenced(data, rows.silenced, silenced)
        return
    tokens = folder.num_tokens("train")
    if tokens <= seq_len:  # plus one, because the last target is the next sample's first input
        got = f"{tokens:,} training tokens are too few for one sample of {seq_len:,} tokens and its last target"
        raise RecipeError(Problem("too_little_data", got, "data.seq_len", "lower data.seq_len, or add text"))


def _all_silenced(data: DataSpec, count: int, silenced: list[tuple[str, int]]) -> RecipeError:
    """Return the error for a source without a token to train on within `data.seq_len`."""
    got = f"each of {count:,} conversations has its first reply beyond data.seq_len={data.seq_len:,}: no row has a "
    got += "token to train on"
    if not silenced:
        hint = "raise data.seq_len, or prepare the folder again from shorter conversations"
        return RecipeError(Problem("too_little_data", got, "data.seq_len", hint))
    name, before = silenced[0]
    file, _, line = name.rpartition(":")
    least = min(before for _, before in silenced)
    most = max(before for _, before in silenced)
    got += f"; the reply of the first begins after {before:,} tokens"
    hint = f"replies begin after {least:,} to {most:,} tokens: raise data.seq_len well above that, or shorten what "
    hint += "precedes them (a long system prompt?)"
    return RecipeError(Problem("too_little_data", got, "data.seq_len", hint, file=file, line=int(line)))
