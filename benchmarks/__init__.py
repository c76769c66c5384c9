"""Measured comparisons: ``python -m nox -s bench``."""
