"""Packages that take seconds to import, imported by the tests that use them and not while tests are collected."""

from typing import Any

import pytest


class Late:
    """A module that is imported when something of it is first used; a test that does so where it lacks is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks what it collects
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._name, reason="needs the reference extra"), name)
