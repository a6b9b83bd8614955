"""Read the rows of Parquet and Arrow tables. Needs extra `hf`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.reading.files import check_regular
from trainspec_cli.data.corpus.mistakes import BAD_DOCUMENT, excerpt

ROWS_AT_ONCE = 1024


def table_rows(file: Path, wanted: Sequence[str], hint: str) -> Iterator[Mapping[str, object]]:
    """Yield rows with the columns of `wanted` that the file has.

    Raises RecipeError with `hint` if it has none, MachineError on damage.
    """
    import pyarrow

    check_regular(file)
    try:
        batches = _parquet(file, wanted, hint) if file.suffix == ".parquet" else _arrow(file, wanted, hint)
        for batch in batches:
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise MachineError(f"{file} cannot be read: {error}", code="unreadable_file") from error


def _parquet(file: Path, wanted: Sequence[str], hint: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as content:
        columns = _present(file, content.schema_arrow.names, wanted, hint)
        yield from content.iter_batches(ROWS_AT_ONCE, columns=columns)


def _arrow(file: Path, wanted: Sequence[str], hint: str) -> Iterator[Any]:
    """Yield batches of the stream format (which `datasets` writes) or of the file format, which ends in an index."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        # The suffix is the same for both formats; the file format alone begins with this word.
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        columns = _present(file, reader.schema.names, wanted, hint)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield batch.select(columns)


def _present(file: Path, names: Sequence[str], wanted: Sequence[str], hint: str) -> list[str]:
    present = [name for name in wanted if name in names]
    if not present:
        message = f"no column `{wanted[0]}`; it has: {excerpt(', '.join(names), 200)}"
        raise RecipeError(Problem(BAD_DOCUMENT, message, "data.path", hint, file=str(file)))
    return present
