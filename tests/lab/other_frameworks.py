"""Frameworks that are tried with trainspec, and that its own tests do not install."""

from __future__ import annotations

NOT_IN_CI = "is not installed, and CI trains without it"
