"""What is believed about the clocks before any message is looked at: `--assume` and the facts behind its default.

A prior is weaker than every message: where messages contradict it, it is dropped for that rank, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from traceana.errors import ClockError
from traceana.tables import RankInfo

__all__ = ["CPU_GPU_NS", "SAME_HOST_NS", "Assume", "Prior", "Probe", "choose_prior", "host_names", "read_probes"]

# Ranks of one host read one clock; each profiler fits its own line to it (Kineto: 1001 readings at both ends).
SAME_HOST_NS = 5_000
# CPU and GPU stamps of one trace go through one conversion (Kineto hands CUPTI its own clock). On H200 the launches
# and syncs of ten captures leave room for -4.8 to +4.1 us, and the GPUs of two ranks agree to 0.3 us.
CPU_GPU_NS = 1_000

_TRIP = ("sent_ns", "received_there_ns", "answered_there_ns", "received_ns")


@dataclass(frozen=True, slots=True)
class Assume:
    """`--assume`: auto (decide by the facts), same-host, ntp (hosts agree within `microseconds`) or none."""

    kind: Literal["auto", "same-host", "ntp", "none"] = "auto"
    microseconds: int = 0

    @classmethod
    def parse(cls, text: str | None) -> Assume:
        """`same-host`, `ntp:MICROSECONDS`, `none`, or None for the default. Raises ClockError for anything else."""
        if text is None or text == "auto":
            return cls()
        if text == "same-host":
            return cls("same-host")
        if text == "none":
            return cls("none")
        head, _, tail = text.partition(":")
        if head == "ntp" and tail.isascii() and tail.isdigit() and 0 < int(tail) <= 10**9:
            return cls("ntp", int(tail))
        raise ClockError(
            f"cannot read the clock assumption {text!r}",
            where="--assume",
            hint="give same-host, ntp:MICROSECONDS (for instance ntp:500) or none",
        )


@dataclass(frozen=True, slots=True)
class Prior:
    """Ranks that share a host's clock (`host_of[rank]`: an index), how far the clocks of two hosts may be apart
    (`between_ns`; None: unknown), and the reason in words. With kind none, hosts only say whose probes concern a
    rank."""

    kind: Literal["same-host", "ntp", "none"]
    reason: str
    host_of: Mapping[int, int] = field(default_factory=dict[int, int])
    between_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """One way of one round trip: clock of host `b` minus clock of host `a` was at most `upper_ns` when a's showed
    `at_ns`. Hosts are indices as in `Prior.host_of`."""

    a: int
    b: int
    upper_ns: int
    at_ns: int


def _hosts(infos: Sequence[RankInfo], manifest: Mapping[str, object] | None) -> dict[int, str]:
    """Host of each rank as far as the traces or the manifest say."""
    named: dict[int, str] = {i.rank: i.host for i in infos if i.host}
    listed = (manifest or {}).get("ranks")
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        for row in listed:
            if isinstance(row, Mapping):
                rank, host = row.get("rank"), row.get("host")
                if isinstance(rank, int) and isinstance(host, str) and host:
                    named.setdefault(rank, host)
    return named


def host_names(infos: Sequence[RankInfo], manifest: Mapping[str, object] | None) -> list[str]:
    """Names of the hosts, in the order of their lowest rank; a host's place is its index."""
    named = _hosts(infos, manifest)
    return list(dict.fromkeys(named[i.rank] for i in sorted(infos, key=lambda i: i.rank) if i.rank in named))


def choose_prior(
    infos: Sequence[RankInfo],
    assume: Assume,
    *,
    manifest: Mapping[str, object] | None = None,
    nnodes: int | None = None,
) -> Prior:
    """The prior for these ranks.

    By default: one clock per host where hosts are known, one clock for all where `nnodes` is 1 or where all traces have
    the same base time and each its own GPU index; otherwise none.
    """
    ranks = sorted(i.rank for i in infos)
    everyone = dict.fromkeys(ranks, 0)
    names = host_names(infos, manifest)
    named = _hosts(infos, manifest)
    by_host = {rank: names.index(named[rank]) for rank in ranks if rank in named}
    if assume.kind == "none":
        return Prior("none", "--assume none", by_host)
    if assume.kind == "same-host":
        return Prior("same-host", "--assume same-host", everyone)
    if assume.kind == "ntp":
        hosts = by_host if len(by_host) == len(ranks) else {rank: n for n, rank in enumerate(ranks)}
        why = "per host" if hosts is by_host else "per rank, as hosts are not known"
        reason = f"--assume ntp: clocks agree within {assume.microseconds} us, {why}"
        return Prior("ntp", reason, hosts, assume.microseconds * 1000)
    if len(by_host) == len(ranks) and ranks:
        if len(names) == 1:
            return Prior("same-host", f"all ranks name the host {names[0]}", everyone)
        return Prior("same-host", f"{len(names)} hosts are named; ranks of one host share its clock", by_host)
    if nnodes == 1:
        return Prior("same-host", "the server ran on one node (nnodes 1)", everyone)
    devices = [i.device for i in infos]
    own_gpu = None not in devices and len(set(devices)) == len(devices)
    if nnodes is None and own_gpu and len({i.base_time_ns for i in infos}) == 1:
        return Prior("same-host", "all traces have the same base time and each its own GPU index", everyone)
    return Prior("none", "nothing shows that the ranks share a host", by_host)


def read_probes(
    manifest: Mapping[str, object] | None, infos: Sequence[RankInfo]
) -> tuple[list[Probe], list[dict[str, object]]]:
    """The round trips between hosts that the capture recorded (`clock.round_trips` of manifest.json: `local`, `remote`
    and the four stamps of each trip), and losses for those that cannot be used."""
    clock = (manifest or {}).get("clock")
    listed = clock.get("round_trips") if isinstance(clock, Mapping) else None
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return [], []
    names = host_names(infos, manifest)
    probes: list[Probe] = []
    elsewhere = broken = 0
    for row in listed:
        entry: Mapping[object, object] = row if isinstance(row, Mapping) else {}
        local, remote, trips = (entry.get(k) for k in ("local", "remote", "trips"))
        if local not in names or remote not in names or local == remote:
            elsewhere += 1
            continue
        a, b = names.index(str(local)), names.index(str(remote))
        for trip in trips if isinstance(trips, Sequence) and not isinstance(trips, str) else ():
            stamps = [trip.get(k) if isinstance(trip, Mapping) else None for k in _TRIP]
            sent, there, answered, back = (s if isinstance(s, int) else None for s in stamps)
            if sent is None or there is None or answered is None or back is None or back < sent or answered < there:
                broken += 1
                continue
            probes += [Probe(a, b, there - sent, sent), Probe(b, a, back - answered, answered)]
    losses: list[dict[str, object]] = []
    for name, count, detail in (
        ("clock_probe_elsewhere", elsewhere, "round trips between hosts of which at most one has ranks here"),
        ("clock_probe_broken", broken, "round trip without four whole stamps in order"),
    ):
        if count:
            losses.append({"name": name, "severity": "info", "rank": None, "count": count, "detail": detail})
    return probes, losses
