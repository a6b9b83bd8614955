"""The parent's side of the process that a chat template runs in (template_worker.py)."""

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
"""Processor time allowed for one conversation."""


class TemplateProcess:
    """The process; started at first use, and again after the kernel has ended it for exceeding a limit."""

    def __init__(self, source: str):
        self._source = source
        self._process: subprocess.Popen[str] | None = None
        self.fault = str(self._start().get("fault", ""))
        """The reason why the template cannot be run at all; empty if it can."""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return {text, spans}, or {fault}."""
        if self._process is None:
            self._start()
        answer = self._exchange(json.dumps(question, default=str, allow_nan=True))
        if answer is None:
            return {"fault": f"it took more than {CPU_LIMIT_S:g} s for one conversation"}
        return answer

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
        answer = self._exchange(json.dumps(self._source, allow_nan=False))
        if answer is None:
            return {"fault": f"it took more than {CPU_LIMIT_S:g} s to compile, or its process does not start"}
        return answer

    def _exchange(self, line: str) -> dict[str, Any] | None:
        """Send a line and return its answer; None if the process ended instead."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self.close()
            return None
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def close(self) -> None:
        """End the process. It would also end by itself when its standard input is closed."""
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            process.kill()
            process.wait()

    def __del__(self) -> None:
        self.close()
