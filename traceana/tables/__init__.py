"""Canonical tables of a capture: one `RankTables` per rank, checked against `traceana.schema`."""

from traceana.tables.capture import CaptureTables, ProcessGroup, RankInfo, RankTables, ServerFacts

__all__ = ["CaptureTables", "ProcessGroup", "RankInfo", "RankTables", "ServerFacts"]
