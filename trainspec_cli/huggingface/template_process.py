"""The process that a chat template runs in, as the one that asks it sees it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("template_worker.py")
CPU_LIMIT_S = 10.0
"""Of the processor, for one conversation."""


class TemplateProcess:
    """Started for the first conversation, and again after one that the kernel has ended it for."""

    def __init__(self, source: str):
        self._source = source
        self._process: subprocess.Popen[str] | None = None
        self.fault = str(self._start().get("fault", ""))
        """Why the template cannot be run at all; empty where it can."""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """-> {text, spans}, or {fault}."""
        if self._process is None:
            self._start()
        told = self._exchange(json.dumps(question, default=str, allow_nan=True))
        if told is None:
            return {"fault": f"it took more than {CPU_LIMIT_S:g} s for one conversation"}
        return told

    def _start(self) -> dict[str, Any]:
        environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(CPU_LIMIT_S)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        told = self._exchange(json.dumps(self._source, allow_nan=False))
        if told is None:
            return {"fault": f"it took more than {CPU_LIMIT_S:g} s to compile, or its process does not start"}
        return told

    def _exchange(self, line: str) -> dict[str, Any] | None:
        """None where the process has ended instead of an answer."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            told = self._process.stdout.readline()
        except BrokenPipeError:
            told = ""
        if not told:
            self.close()
            return None
        answer: dict[str, Any] = json.loads(told)
        return answer

    def close(self) -> None:
        """The process ends by itself when nobody can ask it any more."""
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            process.kill()
            process.wait()

    def __del__(self) -> None:
        self.close()
