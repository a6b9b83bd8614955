"""Prepared data in the cache. A folder's name is a digest of everything that its tokens depend on."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from trainspec_cli.core.node import cache_dir
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus.chat import describe
from trainspec_cli.data.corpus.own_tokenizer import tokenizer_sha256
from trainspec_cli.data.corpus.shards import SCHEMA
from trainspec_cli.recipe.keys.run import DataSpec


def cached_folder(data: DataSpec, files: list[Path]) -> Path:
    """Return the cache folder for `data` read from `files` in their present state (path, size, modification time)."""
    facts = json.dumps(_facts(data, files), sort_keys=True, allow_nan=False)
    kind = "own" if data.is_own else data.source
    return cache_dir() / "tokens" / f"{kind}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _facts(data: DataSpec, files: list[Path]) -> dict[str, object]:
    import tokenizers

    from trainspec_cli.data.corpus.own_source import source_facts  # loads numpy, which plans do without

    return {
        "schema": SCHEMA,
        "tokenizers": tokenizers.__version__,
        "python": sys.version if data.source == "python_stdlib" else None,
        "source": source_facts(data) if data.is_own else data.source,
        "text_field": data.text_field if data.source in ("jsonl", "parquet", "arrow") else None,
        "heldout_fraction": data.heldout_fraction,
        "max_bytes": data.max_bytes,
        "tokenizer": _tokenizer_facts(data),
        **describe(data),
        "files": []
        if data.is_own
        else [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
    }


def _tokenizer_facts(data: DataSpec) -> list[object]:
    spec = data.tokenizer
    if spec.code:
        return ["own", tokenizer_sha256(data)]
    if spec.path is None:
        return ["trained", spec.vocab_size]
    content = expand(spec.path).read_bytes()
    return ["given", hashlib.sha256(content).hexdigest(), spec.end_of_document]
