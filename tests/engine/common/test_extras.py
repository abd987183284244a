"""What is said to install an extra fits how the package itself was installed."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from jitney.engine.common.extras import how_to_install


class Installed:
    """A distribution of which pip wrote down where it came from, or nothing."""

    def __init__(self, origin: dict[str, object] | None):
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


EDITABLE = {"url": "file:///home/a/jitney", "dir_info": {"editable": True}}
FOLDER = {"url": "file:///home/a/jitney", "dir_info": {}}
WHEEL = {"url": "file:///home/a%20b/jitney-0.1.0-py3-none-any.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([EDITABLE], 'pip install -e ".[ray]" in the clone'),
        ([FOLDER], 'pip install ".[ray]" in the clone'),
        ([WHEEL], 'pip install "jitney-0.1.0-py3-none-any.whl[ray]" with that wheel'),
        # The folder that setuptools leaves in a clone says nothing, and comes first there.
        ([None, EDITABLE], 'pip install -e ".[ray]" in the clone'),
        (
            [None],
            'pip install -e ".[ray]" in the clone, or pip install "jitney-VERSION.whl[ray]"',
        ),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    monkeypatch: pytest.MonkeyPatch, found: list[dict[str, object] | None], said: str
):
    installed = [Installed(origin) for origin in found]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: installed)
    assert how_to_install("ray") == said


def test_another_extra_that_would_do_is_named_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [Installed(EDITABLE)])
    assert (
        how_to_install("cuda12", "cuda13") == 'pip install -e ".[cuda12]" (or cuda13) in the clone'
    )
