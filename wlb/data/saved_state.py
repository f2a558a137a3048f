"""Comparing what a saved state was made with to what is there now."""

from __future__ import annotations

from wlb.errors import StateError


def require_equal(field: str, *, saved: object, present: object) -> None:
    """Raise StateError, naming the field and both values, unless they are equal."""
    if saved != present:
        raise StateError(f"{field} must be what the saved state was made with: saved {saved!r}, present {present!r}")
