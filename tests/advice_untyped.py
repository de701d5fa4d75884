"""Advice that no test types, each with its reason."""

UNTYPED: dict[str, str] = {}
