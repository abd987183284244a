"""What stays of the values that are kept, and what goes."""

from __future__ import annotations

from jitney.engine.common.lru import LruCache


def cache(most: int) -> LruCache[str, int]:
    return LruCache(most, size_of=len)


def test_who_was_asked_for_longest_ago_goes_first():
    kept = cache(6)
    for value, key in enumerate(["aa", "bb", "cc"]):
        kept.put(key, value)
    assert kept.get("aa") == 0 and kept.get("zz") is None
    kept.put("dd", 3)
    assert [key for key in ("aa", "bb", "cc", "dd") if key in kept] == ["aa", "cc", "dd"]
    kept.put("eeee", 4)
    assert [key for key in ("aa", "cc", "dd", "eeee") if key in kept] == ["dd", "eeee"]


def test_a_new_value_takes_the_place_of_its_keys_old_one():
    kept = cache(4)
    kept.put("aa", 0)
    kept.put("bb", 1)
    kept.put("aa", 2)
    assert len(kept) == 2 and kept.get("aa") == 2
    kept.put("cc", 3)
    assert "bb" not in kept and "aa" in kept


def test_one_that_is_too_large_alone_stays_until_the_next():
    kept = cache(3)
    kept.put("a", 0)
    kept.put("bbbbb", 1)
    assert len(kept) == 1 and kept.get("bbbbb") == 1
    kept.put("c", 2)
    assert len(kept) == 1 and kept.get("c") == 2
