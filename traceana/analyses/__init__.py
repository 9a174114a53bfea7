"""Analyses: each takes a `Trace` and returns a `Result`. They do not know each other."""
