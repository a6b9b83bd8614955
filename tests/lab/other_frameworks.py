"""Frameworks that are tried with trainspec, and that its own tests do not install."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

NOT_IN_CI = "is not installed, and CI trains without it"


def python_with(package: str) -> str:
    """Return a Python that has the package: the one that PYTHON_PACKAGE names (PYTHON_JAX), or this one; skip the test
    where neither is there."""
    named = os.environ.get(f"PYTHON_{package.upper()}", "")
    if not named and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} {NOT_IN_CI}")
    return named or sys.executable
