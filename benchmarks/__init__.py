"""Benchmarks: one question a module, run as python -m benchmarks.NAME."""
