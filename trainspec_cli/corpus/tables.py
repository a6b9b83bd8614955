"""Rows of Parquet files and of Hugging Face datasets on disk (Arrow), one after another (extra `hf`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainspec_cli.errors import MachineError, Problem, RecipeError
from trainspec_cli.reading.files import check_regular

ROWS_AT_ONCE = 1024
SUFFIXES = (".parquet", ".arrow")


def table_rows(file: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The columns of `wanted` that the file has. Raises RecipeError where there are none, MachineError on damage."""
    import pyarrow

    check_regular(file)
    try:
        batches = _parquet(file, wanted) if file.suffix == ".parquet" else _arrow(file, wanted)
        for batch in batches:
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise MachineError(f"{file} cannot be read: {error}", code="unreadable_file") from error


def _parquet(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as content:
        columns = _present(file, content.schema_arrow.names, wanted)
        yield from content.iter_batches(ROWS_AT_ONCE, columns=columns)


def _arrow(file: Path, wanted: Sequence[str]) -> Iterator[Any]:
    """`datasets` writes the stream format; other programs the file format, which ends in an index."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        columns = _present(file, reader.schema.names, wanted)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield batch.select(columns)


def _present(file: Path, names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    present = [name for name in wanted if name in names]
    if not present:
        message = f"no column `{wanted[0]}`; it has: {', '.join(names)}"
        hint = "data.text_field=NAME says which to read"
        raise RecipeError(Problem("bad_document", message, "data.path", hint, file=str(file)))
    return present
