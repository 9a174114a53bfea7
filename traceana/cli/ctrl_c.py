"""Whether the user pressed Ctrl-C, also where the exception that says so is lost on its way up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["CtrlC"]

_AGAIN_S = 0.05


class CtrlC:
    """While its block runs, `pressed` tells whether Ctrl-C was.

    Two ways lead past KeyboardInterrupt: Python drops it where it strikes in a finalizer or a weakref's callback (the
    signal is then sent again), and where it stops polars another error may come up in its place. Does nothing beside
    the main thread, or where a program that calls us handles the signal in its own way.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._mine = False

    def __enter__(self) -> CtrlC:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._mine = True
            signal.signal(signal.SIGINT, self._handle)
            self._dropped, sys.unraisablehook = sys.unraisablehook, self._again
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._mine:
            sys.unraisablehook = self._dropped
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.default_int_handler(number, frame)

    def _again(self, dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # Not at once: that would strike in here, where it is dropped too.
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            self._dropped(dropped)
