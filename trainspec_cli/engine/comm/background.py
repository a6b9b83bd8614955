"""Work in a thread of its own, one piece after another, while the main thread computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Queue

import torch

from trainspec_cli.engine.accelerators import on_chip, own_stream, synchronise_stream
from trainspec_cli.engine.marks import Mark, mark, wait_for

UNHEARD_S = 10.0


class Background:
    """Runs what it is given in the order in which it came. The end of the process does not wait for it."""

    def __init__(
        self,
        device: torch.device,
        note: Callable[[float, float], None],
        most_waiting: int = 0,
        give_up: Callable[[], object] | None = None,
    ):
        """`note` is called with the times when each piece began and ended, on the host's clock. `start` waits while
        `most_waiting` pieces have not begun; 0: it never does. `give_up` is called where the main thread has not heard
        of an error for `UNHEARD_S`: it may wait for other ranks, and they for what was not run."""
        self._device, self._note, self._give_up = device, note, give_up
        self._unheard: threading.Timer | None = None
        self._given: Queue[Callable[[], None] | None] = Queue(most_waiting)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[], None], after: Callable[[], object] = lambda: None) -> None:
        """Run `act` after what was started before it, once the device has done what the current stream has to do, and
        when `after` has returned. Raises the first error of what was started before."""
        if self._error is not None:
            self.wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
            self._thread.start()
        reached = mark(on_gpu=on_chip(self._device))
        self._given.put(lambda: self._run(act, reached, after))

    def wait(self) -> None:
        """Wait until all is done. Raises the first error; what was started after it has not been run."""
        self._given.join()
        if (error := self.take_error()) is not None:
            raise error

    def take_error(self) -> BaseException | None:
        """Return the first error, which nobody has to hear of any more."""
        error, self._error = self._error, None
        if self._unheard is not None:
            self._unheard.cancel()
        return error

    def close(self) -> None:
        """End the thread once all is done."""
        if self._thread is not None:
            self._given.put(None)
            self._thread = None

    def _work(self) -> None:
        with own_stream(self._device):
            while (act := self._given.get()) is not None:
                try:
                    if self._error is None:
                        act()
                except BaseException as error:  # the main thread raises it
                    self._error = error
                    self._await_main()
                del act  # it holds tensors
                self._given.task_done()

    def _await_main(self) -> None:
        if self._give_up is not None:
            self._unheard = threading.Timer(UNHEARD_S, self._give_up)
            self._unheard.daemon = True
            self._unheard.start()

    def _run(self, act: Callable[[], None], reached: Mark, after: Callable[[], object]) -> None:
        wait_for(reached)
        after()
        started_s = time.perf_counter()
        act()
        synchronise_stream(self._device)
        self._note(started_s, time.perf_counter())
