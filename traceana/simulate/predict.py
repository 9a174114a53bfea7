"""`predict`: what changes would do to the throughput of the unprofiled server, with a range and what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias, cast

from traceana.errors import ModelError, TraceanaError
from traceana.model.model import Model
from traceana.simulate.calibrate import Calibration, calibrate
from traceana.simulate.changes import Change, parse_words
from traceana.simulate.growth import CONSTANT, GROWING, MIDDLE, PPM, Experts, experts_of
from traceana.simulate.merge import merged_ratio
from traceana.simulate.parts import Parts, measure
from traceana.simulate.play import EAGER, Ends, Round, eager_ns, play, play_as_profiled, services
from traceana.simulate.scenario import Scenario, apply, placed
from traceana.simulate.work import stage_work

__all__ = ["NOISE_PERCENT", "Prediction", "Predictor", "StageFigures", "predict", "predict_many", "pricer"]

# Two runs of one server differ by more than 5 % in a quarter of the pairs (docs/concepts/whatif.md).
NOISE_PERCENT = 6
_IDENTITY_PERCENT = 5  # what the model may miss the profiled period by
# Where host time whose place is not said may be besides, for the range.
_ELSEWHERE = "process"
METHOD = (
    "slot-level simulation of SGLang's pipeline loop with this capture's host pieces, GPU times and hops; "
    "own throughput times the predicted ratio"
)


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage in the predicted server: share of time its GPU computes, and idle ns per micro-batch step."""

    rank: int
    utilisation: float
    bubble_ns: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Throughputs are decode tokens per second of the whole unprofiled server, `low` to `high` the range; `period_ns`
    is the time of a micro-batch step, `token_ns` from one token of a request to its next (None where nothing
    decodes). `slots` are the batches of the predicted slots, None where the capture's visits were played as they
    were."""

    baseline: float
    source: str
    throughput: float
    low: float
    high: float
    period_ns: int
    token_ns: int | None
    stages: tuple[StageFigures, ...]
    slots: tuple[int, ...] | None
    changes: tuple[str, ...]
    method: str
    calibration: str
    extrapolations: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Predicted over own throughput, less one."""
        return self.throughput / self.baseline - 1

    def as_json(self) -> dict[str, object]:
        """The document of `traceana whatif --json` (docs/concepts/whatif.md)."""
        return {
            "baseline": {"throughput_tokens_per_s": self.baseline, "source": self.source},
            "predicted": {
                "throughput_tokens_per_s": self.throughput,
                "low": self.low,
                "high": self.high,
                "period_ns": self.period_ns,
                "token_ns": self.token_ns,
                "slots": None if self.slots is None else list(self.slots),
                "stages": [
                    {"rank": s.rank, "utilisation": s.utilisation, "bubble_ns": s.bubble_ns} for s in self.stages
                ],
            },
            "changes": list(self.changes),
            "method": self.method,
            "calibration": self.calibration,
            "extrapolations": list(self.extrapolations),
        }


class Predictor:
    """A capture cut into pieces and calibrated once, to predict with many times."""

    def __init__(self, model: Model) -> None:
        """Raises ModelError where the capture is no pipeline or cannot be played (see `traceana.simulate.parts`)."""
        self.parts = measure(model)
        self.experts: Experts = experts_of(model.facts)
        self._calibrations: dict[tuple[int, ...], list[Calibration]] = {}
        self.identity_ns = play_as_profiled(self.parts, self.experts)

    def calibrations(self, taken: Sequence[int]) -> list[Calibration]:
        """Calibrations given what is said to be taken off each stage's host, made once."""
        key = tuple(taken)
        if key not in self._calibrations:
            self._calibrations[key] = calibrate(self.parts, self.experts, key)
        return self._calibrations[key]

    def predict(self, changes: Sequence[Change]) -> Prediction:
        """What `changes`, all of them together, would give. Raises TraceanaError where one does not fit the capture."""
        parts = self.parts
        scenario = apply(parts, changes)
        calibrations = self.calibrations(scenario.taken)
        largest = _largest_graph(parts)
        sizes = {b for _, pattern in scenario.patterns for b in pattern if b}
        if parts.decode and not sizes:
            raise ModelError("no slot holds a request", hint="allow at least one request to run")
        if scenario.merge:
            if not parts.decode:
                raise ModelError(
                    "the capture holds no decode step", where="merge_waiting", hint="profile while the server decodes"
                )
            sizes |= {sum(pattern) for _, pattern in scenario.patterns}
        unseen = sorted(b for b in sizes if b not in parts.rows_of) if parts.decode else []
        beyond = [b for b in unseen if not _between(parts, b)]
        eager = scenario.graph is False or (largest is not None and any(b > largest for b in sizes) and _graphed(parts))
        ends = [
            Ends(growth, cost)
            for growth in ((MIDDLE, CONSTANT, GROWING) if beyond else (MIDDLE,))
            for cost in (EAGER if eager else EAGER[:1])
        ]
        scenarios = [scenario, placed(scenario, _ELSEWHERE)] if any(scenario.anywhere) else [scenario]
        outcomes: list[tuple[int, Round, Calibration, Ends, str]] = []
        for calibration, played in product(calibrations, scenarios):
            for arrival, pattern in scenario.patterns:
                for end in ends:
                    done = play(parts, played, calibration.speed, pattern, self.experts, end, largest)
                    ratio = done.throughput * PPM // max(calibration.round.throughput, 1)
                    if scenario.merge:
                        service = services(parts, played, calibration.speed, self.experts, end)
                        ratio = ratio * merged_ratio(pattern, done.ns, service, serial_last=scenario.depth == 0) // PPM
                    if not parts.decode:
                        ratio = self._diluted(ratio, calibration)
                    where = arrival if played is scenario else f"{arrival}, {_ELSEWHERE}"
                    outcomes.append((ratio, done, calibration, end, where))
        return self._summary(changes, scenario, calibrations, outcomes, unseen, beyond, eager)

    def _summary(
        self, changes: Sequence[Change], scenario: Scenario, calibrations: Sequence[Calibration],
        outcomes: Sequence[tuple[int, Round, Calibration, Ends, str]], unseen: Sequence[int], beyond: Sequence[int],
        eager: bool,
    ) -> Prediction:  # fmt: skip
        parts = self.parts
        # In the middle: the likeliest arrival, the middle of growth, eager launches as measured; the mean over the calibrations.
        likely = scenario.patterns[0][0]
        usual = Ends(CONSTANT if beyond and self.experts.unknown else MIDDLE)
        central = [o for o in outcomes if o[4] == likely and o[3] == usual and o[2].likely]
        rounds = [c.round.throughput for c in ({id(o[2]): o[2] for o in central}).values()]
        told = parts.own if parts.own is not None else parts.throughput
        own = told if told is not None else sum(rounds) // len(rounds)
        predicted = own * (sum(o[0] for o in central) // len(central)) // PPM
        reach = (
            [(own if told is not None else o[2].round.throughput) * o[0] // PPM for o in outcomes] if changes else []
        )
        # A model that does not give the capture's own period is trusted less by as much.
        percent = NOISE_PERCENT + min(max(0, self._identity_percent() - _IDENTITY_PERCENT), 90 - NOISE_PERCENT)
        low = min([*reach, predicted]) * (100 - percent) // 100
        high = max([*reach, predicted]) * (100 + percent) // 100
        # One round stands for the figures per stage: the central one whose throughput is nearest to the prediction.
        shown = min(central, key=lambda o: (abs(own * o[0] // PPM - predicted), o[0]))[1]
        # The round that the prediction means; where the server's own throughput could not be matched, not the model's.
        round_ns = shown.tokens * 1_000_000_000_000 // max(predicted, 1) if parts.decode else shown.ns
        steps = max(shown.steps, 1)
        stages = tuple(
            StageFigures(stage.rank, min(1.0, gpu / max(round_ns, 1)), max(0, (round_ns - gpu) // steps))
            for stage, gpu in zip(parts.stages, shown.gpu, strict=True)
        )
        return Prediction(
            baseline=own / 1000,
            source=parts.source or "simulated: the capture does not say the server's own throughput",
            throughput=predicted / 1000,
            low=low / 1000,
            high=high / 1000,
            period_ns=round_ns // steps,
            token_ns=round_ns if parts.decode else None,
            stages=stages,
            slots=scenario.patterns[0][1] if parts.decode else None,
            changes=tuple(c.text for c in changes),
            method=METHOD,
            calibration=self._calibrated(calibrations),
            extrapolations=(*scenario.notes, *self._extrapolated(scenario, calibrations, unseen, beyond, eager)),
        )

    def _diluted(self, ratio: int, calibration: Calibration) -> int:
        """The ratio (ppm) of decoding where the visits played are prefill, which takes only its share of the time."""
        parts = self.parts
        if parts.own is None or parts.throughput is None:
            return ratio
        share = min(PPM, parts.throughput * PPM // max(calibration.round.throughput, 1))
        return PPM * PPM // max(PPM - share + share * PPM // max(ratio, 1), 1)

    def _identity_percent(self) -> int:
        """How far the model is from the profiled period, whole percent."""
        return abs(self.identity_ns - self.parts.period_ns) * 100 // max(self.parts.period_ns, 1)

    def _calibrated(self, calibrations: Sequence[Calibration]) -> str:
        parts = self.parts
        error = (self.identity_ns - parts.period_ns) / max(parts.period_ns, 1)
        identity = f"the model gives the profiled period within {100 * error:+.1f} %"
        held = [int(k.sum()) for k in calibrations[0].speed.known]
        fixed = ", ".join(f"{ns / 1e6:.2f} ms of stage {s}" for s, ns in enumerate(held) if ns)
        kept = f"; not scaled, as a sleep would be: {fixed}" if fixed else ""
        ways = ", ".join(
            f"{c.dilation:.2f} with hosts {c.name}" + ("" if c.likely else " explains it as well") for c in calibrations
        )
        if parts.throughput is None:
            return f"host dilation unknown, tried {ways}; {identity}{kept}"
        missed = (
            ""
            if all(c.matched for c in calibrations)
            else "; where no host dilation explains the server's own throughput, the usual one is taken"
        )
        return f"host dilation by profiling {ways}, from the server's own throughput; {identity}{kept}{missed}"

    def _extrapolated(
        self, scenario: Scenario, calibrations: Sequence[Calibration], unseen: Sequence[int], beyond: Sequence[int],
        eager: bool,
    ) -> list[str]:  # fmt: skip
        out: list[str] = []
        if not self.parts.decode:
            what = (
                "it counts prefill tokens"
                if self.parts.own is None
                else "the server is taken to prefill as much as now"
            )
            out.append(f"the capture holds no decode step, the prediction is of its prefill: {what}")
        if self._identity_percent() > _IDENTITY_PERCENT:
            out.append(
                f"the model misses the profiled period by {self._identity_percent()} %: the range is wider by that"
            )
        if scenario.merge:
            out.append(
                "SGLang has no merging of waiting micro-batches: stages are played as queues in a ring, not as slots"
            )
        between = [b for b in unseen if b not in beyond]
        if between:
            out.append(f"batch {_listed(between)}: interpolated between measured batches")
        if beyond:
            experts = self.experts
            assumed = f" ({', '.join(experts.assumed)} assumed)" if experts.assumed else ""
            out.append(
                f"batch {_listed(beyond)} was not measured: between no growth of the forward and MoE time growing with "
                f"the experts touched, {experts.count} with {experts.top_k} a token{assumed}, and attention with the requests"
                + ("; no growth is taken as the middle" if experts.unknown else "")
            )
        if eager:
            costs = [eager_ns(self.parts, s, c.speed) for c in calibrations for s in range(len(self.parts.stages))]
            usual = sum(costs) // len(costs)
            measured = any(s.kernels.starts.eager_ns for s in self.parts.stages)
            out.append(
                f"kernels launched one by one cost the host {usual // 1000} us each, unprofiled ("
                + ("as those ahead of the graph do here" if measured else "a default, not measured here")
                + "), for the range half to half as much again"
            )
        if any(scenario.anywhere):
            out.append(
                "host time is added to the scheduling, for the range also behind the forward, where less can hide: "
                "--host STAGE@SPAN=+MS says where"
            )
        if scenario.graph is True:
            out.append("kernels of a graph are taken as fast as launched one by one, with 0.5 us between them")
        return out


def predict(model: Model, changes: Sequence[Change]) -> Prediction:
    """What `changes`, all together, would do to the server of `model`. Raises TraceanaError where they do not fit."""
    return Predictor(model).predict(changes)


def predict_many(model: Model, alternatives: Sequence[Sequence[Change]]) -> list[Prediction]:
    """One prediction for each set of changes; the capture is cut and calibrated once."""
    predictor = Predictor(model)
    return [predictor.predict(changes) for changes in alternatives]


_Price: TypeAlias = "Callable[[Sequence[Sequence[str]]], list[Mapping[str, object] | None]]"


def pricer(model: Model) -> tuple[_Price | None, list[dict[str, object]]]:
    """What prices findings: for each list of changes in the words of `traceana whatif` (see
    `traceana.simulate.changes.parse_words`) the `predicted` object of its document with `low` and `high`, None where
    the change does not fit the capture. And what each stage does (`traceana.simulate.work.stage_work`). None and
    nothing where the capture cannot be played at all."""
    try:
        predictor = Predictor(model)
    except ModelError:
        return None, []

    def price(alternatives: Sequence[Sequence[str]]) -> list[Mapping[str, object] | None]:
        out: list[Mapping[str, object] | None] = []
        for words in alternatives:
            try:
                document = predictor.predict(parse_words(words)).as_json()
            except TraceanaError:
                out.append(None)
            else:
                out.append(cast("Mapping[str, object]", document["predicted"]))
        return out

    return price, stage_work(predictor.parts)


def _between(parts: Parts, batch: int) -> bool:
    sizes = [b for b in parts.rows_of if b > 0]
    return min(sizes) < batch < max(sizes)


def _graphed(parts: Parts) -> bool:
    return any(bool(s.graphed.any()) for s in parts.stages)


def _largest_graph(parts: Parts) -> int | None:
    graphs = parts.facts.get("cuda_graph")
    sizes = cast("Mapping[str, object]", graphs).get("captured_sizes") if isinstance(graphs, Mapping) else None
    if not isinstance(sizes, list) or not sizes or not _graphed(parts):
        return None
    # SGLang captures no size above max_running_requests: where that is what ended the list, it is no limit.
    running = parts.facts.get("max_running_requests")
    return max(sizes) if not isinstance(running, int) or max(sizes) < running else None


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
