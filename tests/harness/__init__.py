"""Starts ranks by forking one warm process, and what runs in them."""
