"""Asking a file system that may never answer, as that of a network whose server is gone does not."""

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, Callable, Optional


class Patiently:
    """Calls `ask` in a thread of its own and waits `limit_s` for the answer; `otherwise` where there is none in time.

    No other question is asked while one is open, so that a dead file system holds one thread, and none keeps the
    process from ending. `late` is called once for a question that has been open for `late_s`. What `ask` raises in time
    is raised.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        limit_s: float = 2.0,
        otherwise: Any = None,
        *,
        late: Callable[[float], None] = lambda seconds: None,
        late_s: float = 60.0,
    ):
        self._ask, self._limit_s, self._otherwise, self._late, self._late_s = ask, limit_s, otherwise, late, late_s
        self._open: Optional[Future] = None
        self._since_s, self._told = 0.0, False

    def __call__(self, *args: Any) -> Any:
        if self._open is not None and not self._open.done():
            open_s = time.monotonic() - self._since_s
            if open_s > self._late_s and not self._told:
                self._told = True
                self._late(open_s)
            return self._otherwise
        question: Future = Future()
        self._open, self._since_s, self._told = question, time.monotonic(), False
        threading.Thread(target=self._answer, args=(question, args), daemon=True).start()
        try:
            return question.result(self._limit_s)
        except NoAnswer:
            return question.result() if question.done() else self._otherwise  # it may have raised the same

    def _answer(self, question: Future, args: Any) -> None:
        try:
            question.set_result(self._ask(*args))
        except BaseException as error:
            question.set_exception(error)
