"""Values that are kept while there is room: who was asked for longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class LruCache[Key, Value]:
    """Keeps values until they are too large together. most: the sum of all sizes; size_of: what a
    key takes with its value. The value put in last always stays.
    """

    def __init__(self, most: int, size_of: Callable[[Key], int]):
        self._most = most
        self._size_of = size_of
        #: The one asked for longest ago first.
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        """The key's value, which will go last; None if it is not kept."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value in place of the key's old one, and let go of those that have no room."""
        if key not in self._values:
            self._size += self._size_of(key)
        self._values[key] = value
        self._values.move_to_end(key)
        while self._size > self._most and len(self._values) > 1:
            oldest, _ = self._values.popitem(last=False)
            self._size -= self._size_of(oldest)
