"""Sample a thread's stack, and find the lines of code that most samples have in common.

The process samples itself, so a thread that holds the interpreter lock in native code is sampled only when it releases
the lock. If py-spy is installed (the extra `sampling`), it samples the process from outside.
"""

from __future__ import annotations

import linecache
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from trainspec_cli.engine.comm import forking as background
from trainspec_cli.recipe.results.verdict import CodeLine

PERIOD_S = 0.005
MOST_SAMPLES = 4000
"""Maximum number of samples."""
MOST_FRAMES = 60
NAMED_LINES = 3
MOST_CHARACTERS = 120
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
SPY_RATE = 100
SPY_S = 1
SPY_ENDS_S = 10.0
"""py-spy is killed this many seconds after its expected end."""
_SPY_FRAME = re.compile(r"(?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)")


class Frame(NamedTuple):
    file: str
    line: int
    function: str


class StackSample(NamedTuple):
    at_ns: int
    """Time of the sample (Unix)."""
    stack: tuple[Frame, ...]
    """The stack's frames, outermost first."""
    times: int = 1

    @property
    def files(self) -> list[str]:
        return [frame.file for frame in self.stack]


def sample_thread(thread: int, is_over: Callable[[], bool]) -> list[StackSample]:
    """Sample the thread with this identifier until `is_over`. Return no samples if the thread has ended."""
    samples: list[StackSample] = []
    while not is_over():
        if len(samples) < MOST_SAMPLES and (frame := sys._current_frames().get(thread)) is not None:
            frames = list[Frame]()
            while frame is not None and len(frames) < MOST_FRAMES:
                frames.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
                frame = frame.f_back
            samples.append(StackSample(time.time_ns(), tuple(reversed(frames))))
        time.sleep(PERIOD_S)
    return samples


def is_in_exchange(files: Sequence[str]) -> bool:
    """Return whether a stack is in an exchange with other ranks, judging by its frames' files, which are given
    outermost first. Only calls made from the innermost line outside of libraries count, because every forked worker's
    outer frames contain torch's launcher.
    """
    inner = list(takewhile(is_library, reversed(files)))
    own = files[-1 - len(inner)] if len(inner) < len(files) else ""
    return own == background.__file__ or any(DISTRIBUTED in file for file in inner)


def code_lines(samples: Iterable[StackSample], total: int) -> tuple[CodeLine, ...]:
    """Return the lines that occur in the most samples, most frequent first, with their fraction of `total` samples. A
    sample's line is the innermost one outside of Python's library and torch."""
    counts = Counter[Frame]()
    for sample in samples:
        own = [frame for frame in sample.stack if not is_library(frame.file)]
        if own:
            counts[own[-1]] += sample.times
    lines = []
    for frame, times in counts.most_common(NAMED_LINES):
        text = linecache.getline(frame.file, frame.line).strip()[:MOST_CHARACTERS]
        share = min(1.0, times / total)
        lines.append(
            CodeLine(file=_shown(frame.file), line=frame.line, function=frame.function, text=text, share=share)
        )
    return tuple(lines)


def is_library(file: str) -> bool:
    if file.startswith("<"):
        return True
    return file.startswith(LIBRARIES) and (file.startswith(LIBRARIES[1]) or not file.startswith(INSTALLED))


def _shown(file: str) -> str:
    """Return the path of a file starting from its outermost package, such as `trainspec_cli/engine/run/step.py`."""
    path = Path(file)
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return str(path.relative_to(root)) if root != path.parent else file


class PySpy:
    """Runs py-spy for a second without pausing this process. Its output goes to `folder`."""

    def __init__(self, program: str, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix=".py-spy-", dir=folder)
        self._output = Path(self._folder.name) / "stacks"
        options = ["--pid", str(os.getpid()), "--duration", str(SPY_S), "--rate", str(SPY_RATE), "--format", "raw"]
        options += ["--threads", "--idle", "--nonblocking", "--full-filenames", "--output", str(self._output)]
        self._process = subprocess.Popen(
            [program, "record", *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    @classmethod
    def find(cls) -> str | None:
        """Return the path of py-spy; None if it is not installed."""
        beside = str(Path(sys.executable).parent)
        return shutil.which("py-spy", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))

    def samples(self, thread: int) -> list[StackSample]:
        """Return the samples of the thread with this native ID. Raises OSError if py-spy was not allowed to read the
        process (`kernel.yama.ptrace_scope`)."""
        try:
            _, error = self._process.communicate(timeout=SPY_S + SPY_ENDS_S)
            if self._process.returncode:
                said = error.decode(errors="replace").strip().splitlines()
                raise OSError(
                    said[-1][:MOST_CHARACTERS] if said else f"it ended with exit code {self._process.returncode}"
                )
            return read_stacks(self._output.read_text(errors="replace"), thread)
        except subprocess.TimeoutExpired as error:
            raise OSError("it did not end in time") from error
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.communicate()
            self._folder.cleanup()


def read_stacks(text: str, thread: int) -> list[StackSample]:
    """Parse the stacks of a thread from py-spy's raw format: `thread (ID): NAME;FUNCTION (FILE:LINE);... COUNT`."""
    samples = []
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        name, *frames = stack.split(";")
        if count.isdigit() and name.startswith(f"thread ({thread})"):
            found = [match for frame in frames if (match := _SPY_FRAME.fullmatch(frame))]
            own = tuple(Frame(one["file"], int(one["line"]), one["function"]) for one in found)
            samples.append(StackSample(0, own, int(count)))
    return samples
