"""Tests. Worker functions of distributed tests are imported by name in other processes."""
