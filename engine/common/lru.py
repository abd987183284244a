"""A cache that drops the least recently used values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class LruCache[Key, Value]:
    """A cache of limited total size, which always keeps the newest value. most: of all sizes."""

    def __init__(self, most: int, size_of: Callable[[Key], int]):
        self._most = most
        self._size_of = size_of
        #: Least recently used first.
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        """The key's value, now the most recently used; None if absent."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Set a key's value, and drop the least recently used ones beyond the limit."""
        if key not in self._values:
            self._size += self._size_of(key)
        self._values[key] = value
        self._values.move_to_end(key)
        while self._size > self._most and len(self._values) > 1:
            oldest, _ = self._values.popitem(last=False)
            self._size -= self._size_of(oldest)
