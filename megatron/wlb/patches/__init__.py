"""Checked, scoped replacements of upstream names: `registry` applies them, every other file is one target."""
