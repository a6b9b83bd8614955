"""Download a model of the Hugging Face Hub into a folder: explicitly, resumably, and checked.

Only weights in safetensors, configs, tokenizers and chat templates are downloaded, never pickles. Unfinished files are
named after the hash of their content, so a later call continues them at the byte where they stopped, and never mixes
two revisions. `huggingface_hub` finds the files and their hashes; since version 2 it no longer continues downloads of
an earlier process, so the transfer itself is here."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.core.reading.hub_cache import HubName
from trainspec_cli.data.huggingface.folder import CONFIG
from trainspec_cli.data.huggingface.safetensors import INDEX, open_checkpoint

TOKEN = "HF_TOKEN"
"""Environment variable with the user's access token, which is sent to the Hub only, and neither printed nor stored."""
PATTERNS = (
    "*.safetensors", "*.safetensors.index.json", CONFIG, "generation_config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""The files of a model's top folder that are downloaded."""
OTHER_LAYOUTS = ("consolidated*",)
"""Copies of the same weights with other names."""
CODE = "*.py"
CHUNK_BYTES = 2**20
TRIES = 5
"""Number of consecutive attempts without a new byte before a download is given up."""
WAIT_S = 1.0
"""Wait before the second attempt; it doubles with each one."""


@dataclass(frozen=True)
class HubFile:
    name: str
    bytes: int
    sha256: str | None
    """Hash of the content; None for small files, which have a `blob` instead."""
    blob: str
    """Git's hash of the content, or of a pointer to it."""

    @property
    def unfinished(self) -> str:
        return f".{self.name}.{(self.sha256 or self.blob)[:16]}.part"

    def is_held(self, file: Path) -> bool:
        """Return whether a file has this content."""
        if not file.is_file() or file.stat().st_size != self.bytes:
            return False
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.bytes, usedforsecurity=False)
        with file.open("rb") as content:
            while chunk := content.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == (self.sha256 or self.blob)


@dataclass(frozen=True)
class Fetched:
    folder: Path
    commit: str
    """The commit that the revision pointed to."""
    files: tuple[HubFile, ...]
    received_bytes: int
    """Bytes received by this call; the others were there."""


Progress = Callable[[str, int, int, int], None]
"""Called with a file's name, the bytes there, all bytes, and the bytes received by this call."""


def by_hand(named: HubName, folder: Path) -> str:
    """Return how to get a model onto a machine without a network."""
    revision = "" if named.revision == "main" else f" --revision {named.revision}"
    return (
        f"by hand: on a machine with a network, run `hf download {named.name}{revision} --local-dir {folder.name}`, "
        f"copy the folder to {folder}, and set init.from=hf:{folder}"
    )


def fetch(named: HubName, folder: Path, progress: Progress, *, code: bool = False) -> Fetched:
    """Download a model into `folder`, or complete an earlier download. What is there is kept if this fails.

    Raises RecipeError for an unknown model or revision or one without safetensors files, and MachineError if the Hub,
    the network, access or the disk is missing, or if a file does not have the content that the Hub states."""
    try:
        import huggingface_hub  # deferred: an extra
        import huggingface_hub.utils
    except ImportError as error:
        hint = f"pip install 'trainspec-cli[hub]'; {by_hand(named, folder)}"
        raise MachineError(Problem("missing_package", "huggingface_hub is not installed", hint=hint)) from error
    token: str | bool = os.environ.get(TOKEN) or False
    endpoint = os.environ.get("HF_ENDPOINT")
    utils: Any = huggingface_hub.utils  # its annotations do not export these functions
    try:
        found = huggingface_hub.HfApi(endpoint, token=token).model_info(
            named.name, revision=named.revision, files_metadata=True, timeout=30
        )
    except Exception as error:
        raise _explain(error, named, folder) from error
    commit = str(found.sha)
    files = select(found.siblings or [], named, code=code)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        left = [file for file in files if not file.is_held(folder / file.name)]
        total = sum(file.bytes for file in files)
        here = total - sum(file.bytes for file in left)
        needed = sum(file.bytes - _size(folder / file.unfinished) for file in left)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{format_bytes(needed)} are needed and {format_bytes(free)} free")
        received = 0
        for file in left:
            url = huggingface_hub.hf_hub_url(named.name, file.name, revision=commit, endpoint=endpoint)
            # Compressed transfers cannot be continued at a byte of the file.
            headers = utils.build_hf_headers(token=token) | {"Accept-Encoding": "identity"}
            start = received
            at = here
            here += file.bytes

            def report(size: int, added: int, *, name: str = file.name, at: int = at, start: int = start) -> None:
                progress(name, at + size, total, start + added)

            received += _transfer(utils.get_session(), url, headers, file, folder, report)
            if not file.is_held(folder / file.unfinished):
                (folder / file.unfinished).unlink()
                message = f"{file.name} arrived with another content than the Hub states, and was deleted"
                raise MachineError(Problem("bad_checkpoint", message, hint="run the same command again"))
            (folder / file.unfinished).replace(folder / file.name)
        for old in folder.glob(".*.part"):  # of other revisions
            old.unlink()
    except TrainspecError:
        raise
    except Exception as error:
        raise _explain(error, named, folder) from error
    check(folder)
    return Fetched(folder, commit, tuple(files), received)


def select(siblings: Sequence[Any], named: HubName, *, code: bool) -> list[HubFile]:
    """Return the files to download, small ones first. Raises RecipeError if there are no weights in safetensors."""
    files = []
    for entry in siblings:
        name = str(entry.rfilename)
        wanted = any(fnmatchcase(name, pattern) for pattern in (*PATTERNS, *(CODE,) * code))
        if "/" in name or not wanted or any(fnmatchcase(name, pattern) for pattern in OTHER_LAYOUTS):
            continue
        files.append(HubFile(name, int(entry.size or 0), entry.lfs.sha256 if entry.lfs else None, str(entry.blob_id)))
    if not any(file.name.endswith(".safetensors") for file in files):
        message = (
            f"{named.name} ({named.revision}) has no weights in safetensors; others can run code when they are read"
        )
        hint = "choose a model with safetensors files, or convert it on a machine that trusts it (save_pretrained)"
        raise RecipeError(Problem("unsupported", message, hint=hint))
    return sorted(files, key=lambda file: (file.bytes, file.name))


def check(folder: Path) -> None:
    """Check that the headers of all safetensors files are complete, and that they contain the tensors that the index
    names. Raises MachineError."""
    try:
        tensors = open_checkpoint(folder)
    except RecipeError as error:
        raise MachineError(error.problems) from error
    if (folder / INDEX).is_file():
        import json

        indexed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        wrong = [name for name, file in indexed.items() if name in tensors and tensors[name].file.name != file]
        wrong += [name for name in tensors if name not in indexed]
        if wrong:
            message = f"{folder / INDEX} does not match the files: {', '.join(sorted(wrong)[:4])}"
            raise MachineError(Problem("bad_checkpoint", message, hint="delete the folder and download it again"))


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _transfer(
    session: Any, url: str, headers: dict[str, str], file: HubFile, folder: Path, report: Callable[[int, int], None]
) -> int:
    """Append the missing bytes of a file. After an interruption it continues at the byte reached. Return the number of
    bytes received."""
    part = folder / file.unfinished
    received = failures = 0
    most = _size(part)
    """The most bytes held so far. A server without ranges starts again, which is no progress until it gets further."""
    while (size := _size(part)) != file.bytes or not part.exists():
        try:
            if size > file.bytes:
                part.unlink()
                raise EOFError(f"the answer was longer than the {file.bytes:,} bytes of the file")
            ranged = headers | ({"Range": f"bytes={size}-"} if size else {})
            with session.stream("GET", url, headers=ranged, follow_redirects=True, timeout=30) as response:
                response.raise_for_status()
                # A server that ignores the range sends the file from its first byte.
                with part.open("ab" if response.status_code == 206 else "wb") as content:
                    report(content.tell(), received)
                    # In the pieces that arrive: collecting larger ones would lose bytes at an interruption.
                    for chunk in response.iter_raw():
                        content.write(chunk)
                        received += len(chunk)
                        report(content.tell(), received)
            if not file.bytes:
                break
            if _size(part) <= most:
                raise EOFError("the answer ended before the file")
            most, failures = _size(part), 0
        except Exception as error:
            if (isinstance(error, OSError) and error.errno) or not _is_passing(error):
                raise
            failures = 1 if most < _size(part) <= file.bytes else failures + 1
            most = max(most, min(_size(part), file.bytes))
            if failures >= TRIES:
                raise
            time.sleep(WAIT_S * 2 ** (failures - 1))
    return received


def _is_passing(error: Exception) -> bool:
    """Return whether another attempt may succeed: the connection was lost, or the server is busy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status in (408, 429) or status >= 500


def _explain(error: Exception, named: HubName, folder: Path) -> TrainspecError:
    """Return the error as users see it. Nothing in it contains the token."""
    from huggingface_hub import errors

    manual = by_hand(named, folder)
    status = getattr(getattr(error, "response", None), "status_code", None)
    has_token = bool(os.environ.get(TOKEN))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"{folder}: the disk is full ({error.strerror})"
        return MachineError(Problem("disk_full", message, hint="free space and run the same command: it continues"))
    if isinstance(error, OSError) and error.filename is not None:
        return MachineError(Problem("refused_by_the_system", f"{error.filename}: {error.strerror}"))
    if isinstance(error, errors.GatedRepoError) or status == 403:
        page = f"https://huggingface.co/{named.name}"
        message = f"{named.name} is gated: its owner must grant you access"
        hint = f"accept its terms at {page}, and set {TOKEN} to a token of that account; {manual}"
        return MachineError(Problem("no_access", message, hint=hint))
    if isinstance(error, errors.RevisionNotFoundError):
        message = f"{named.name} has no revision {named.revision}"
        return RecipeError(Problem("unknown_name", message, "--revision", "name a branch, a tag or a commit"))
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        why = f"{TOKEN} does not give access to it" if has_token else f"it is private, and {TOKEN} is not set"
        message = f"the Hub has no model {named.name}, or {why}"
        hint = f"check the name at https://huggingface.co/{named.name}, or set {TOKEN}"
        return RecipeError(Problem("unknown_name", message, hint=hint))
    what = f"the Hub answered with status {status}" if status else f"the Hub cannot be reached ({type(error).__name__})"
    hint = f"run the same command again, which continues; HF_ENDPOINT names a mirror of the Hub; {manual}"
    return MachineError(Problem("no_network", f"{named.name}: {what}", hint=hint))
