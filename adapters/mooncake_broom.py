"""Removes objects from Mooncake in the background, until its master has heard of it.

What was put is pinned there, so a removal that got lost (the network was cut just then) would be a leak.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict

from adapters.handle import AdapterError
from adapters.mooncake_client import GONE, LATER, OK, Connection, in_words

log = logging.getLogger("mooncake")

MOST = 100_000  #: removals that may wait; beyond that the oldest are forgotten
LINGER_S = 2.0
_AGAIN_S = 1.0


class Broom:
    """Starts a thread with the first removal. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: key, or pattern -> whether it is a pattern, and a number of this wish
        self._due: OrderedDict[str, tuple[bool, int]] = OrderedDict()
        self._wishes = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def remove(self, key: str) -> None:
        """One object. Does not block."""
        self._add(key, pattern=False)

    def remove_matching(self, pattern: str) -> None:
        """All whose keys match a regular expression (ECMAScript's). Does not block."""
        self._add(pattern, pattern=True)

    def close(self) -> None:
        """Gives what is due a little time, and ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._due, LINGER_S)
            self._closed = True
            self._changed.notify_all()

    def _add(self, what: str, *, pattern: bool) -> None:
        with self._changed:
            self._due[what] = pattern, next(self._wishes)
            if len(self._due) > MOST:
                lost, _ = self._due.popitem(last=False)
                log.warning("%s stays in Mooncake: its master has not answered for long", lost)
            if self._thread is None:
                self._thread = threading.Thread(target=self._sweep, daemon=True, name="broom")
                self._thread.start()
            self._changed.notify_all()

    def _sweep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if self._closed:
                    return
                what, wish = next(iter(self._due.items()))
            done = self._removed(what, wish[0])
            with self._changed:
                if done and self._due.get(what, wish) != wish:
                    continue  # it was wished again meanwhile, for what came too late for this removal
                if done:
                    self._due.pop(what, None)
                    self._changed.notify_all()
                elif what in self._due:
                    self._due.move_to_end(what)
                    self._changed.wait_for(lambda: self._closed, _AGAIN_S)

    def _removed(self, what: str, pattern: bool) -> bool:
        """Whether nothing is left to do."""
        try:
            code = self._connection.call(
                lambda store: int(store.remove_by_regex(what, True) if pattern else store.remove(what, True))
            )
        except AdapterError:
            return False
        if code in LATER:
            return False
        if code < OK and code not in GONE:
            log.warning("%s stays in Mooncake: %s", what, in_words(code))
        return True
