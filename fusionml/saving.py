"""Keeps what live prompts learned: tables are written beside the model's calls, never inside one."""

from __future__ import annotations

import atexit
import logging
import threading

from .table import RatioTable

log = logging.getLogger("fusionml")

EXIT_SECONDS = 2.0
"""How long the end of the process may wait for a write."""


class Saver:
    """Writes tables on a thread of its own, which ends when there is nothing left to write.

    A write waits for other processes' lock and for the disk; a prompt must do neither.
    """

    def __init__(self) -> None:
        self._pending: list[RatioTable] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._failed: set[str] = set()

    def soon(self, table: RatioTable) -> None:
        """Write `table` as soon as may be; a table that cannot be written is one warning."""
        with self._lock:
            if table not in self._pending:
                self._pending.append(table)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fusionml-saver", daemon=True)
                self._thread.start()
                atexit.unregister(self.wait)
                atexit.register(self.wait)

    def wait(self, seconds: float = EXIT_SECONDS) -> bool:
        """Wait until all is written, at most so long; whether it is."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return
                table = self._pending.pop(0)
            try:
                table.save()
            except Exception as error:  # nobody is there to be told, and the next table is waiting
                if table.path not in self._failed:
                    self._failed.add(table.path)
                    log.warning("ratio table %s cannot be written, so this run only: %s", table.path, error)
