// Counters under the timeline (micro-batches in flight, power, utilisation) and power over the whole recording: uPlot.

class Panels {
  constructor(timeline, paints, words, places) {
    Object.assign(this, {timeline, paints, words, places});
    this.linked = [];
    this.recording = null;
    this.build();
    timeline.on('view', ([min, max]) => this.linked.forEach((u) => u.setScale('x', {min, max})));
    timeline.on('cursor', (time) => {
      for (const u of this.linked) if (u !== this.source) u.setCursor({left: time === null ? -10 : u.valToPos(time, 'x'), top: -10}, false);
    });
    new ResizeObserver(() => this.resize()).observe(places.linked);
  }

  resize() {
    for (const u of [...this.linked, ...(this.recording ?? [])]) u.setSize({width: this.width(u.root.parentElement), height: u.height});
  }

  width(place) { return this.fixed ?? Math.max(280, place.clientWidth); }

  /** Make all panels again, for instance in the colours of another theme. */
  build() {
    for (const u of [...this.linked, ...(this.recording ?? [])]) u.destroy();
    const c = this.timeline.recording.columns, [min, max] = this.timeline.view;
    this.linked = [];
    if (c.in_flight_start) {
      const x = [...c.in_flight_start, this.timeline.recording.length], y = [...c.in_flight_count, c.in_flight_count.at(-1)];
      this.linked.push(this.panel(this.places.linked, {
        title: 'in flight', height: 84, x: [min, max], y: [0, Math.max(2, ...y)], whole: true, data: [x, y],
        series: [{label: 'micro-batches in flight', stroke: this.paints.accent, fill: `${this.paints.accent}22`, paths: uPlot.paths.stepped({align: 1}), points: {show: false}}],
      }));
    }
    const inside = this.samples((ts) => ts >= -200e6 && ts <= this.timeline.recording.length + 200e6);
    for (const [title, key, unit] of [['power', 'power', 'W'], ['utilisation', 'utilisation', '%']]) {
      if (inside[key]) this.linked.push(this.panel(this.places.linked, {title, height: 100, x: [min, max], ...inside[key], unit, points: true}));
    }
    this.places.none.hidden = Boolean(inside.power || inside.utilisation);
    const all = this.samples(() => true);
    this.recording = this.places.recording && ['power', 'utilisation'].filter((k) => all[k]).map((key) =>
      this.panel(this.places.recording, {title: key, height: 150, ...all[key], unit: key === 'power' ? 'W' : '%', alone: true}));
  }

  /** Samples that `keep` lets through, joined over the ranks: {power: {data, series, y}, utilisation: ...}. */
  samples(keep) {
    const c = this.timeline.recording.columns, out = {};
    if (!c.g_ts) return out;
    const groups = new Map();
    for (let i = 0; i < c.g_ts.length; i++) {
      const key = c.g_rank[i] >= 0 ? this.words.ranks[c.g_rank[i]] ?? `rank ${c.g_rank[i]}` : `GPU ${c.g_gpu[i]}`;
      if (!keep(c.g_ts[i])) continue;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(i);
    }
    const inUse = [...groups].filter(([name]) => !name.startsWith('GPU ')), shown = inUse.length ? inUse : [...groups];
    for (const [name, column, factor] of [['power', c.g_power, 1000], ['utilisation', c.g_utilisation, 10]]) {
      const known = shown.map(([key, rows]) => [key, rows.filter((i) => column[i] >= 0)]).filter(([, rows]) => rows.length > 1);
      if (!known.length) continue;
      const data = uPlot.join(known.map(([, rows]) => [rows.map((i) => c.g_ts[i]), rows.map((i) => column[i] / factor)]));
      const series = known.map(([label], k) => this.line(label, k));
      let top = name === 'utilisation' ? 100 : Math.max(...known.flatMap(([, rows]) => rows.map((i) => column[i] / factor)));
      const limits = known.flatMap(([, rows]) => rows.map((i) => c.g_limit[i])).filter((w) => w > 0);
      if (name === 'power' && limits.length) {
        top = Math.max(top, ...limits.map((w) => w / 1000));
        data.push(data[0].map(() => Math.max(...limits) / 1000));
        series.push({label: 'limit', stroke: this.paints.soft, width: 1, dash: [6, 4], points: {show: false}});
      }
      out[name] = {data, series, y: [0, top * 1.05]};
    }
    return out;
  }

  line(label, k) {
    const {light, dark} = this.paints.palette.lines[k % this.paints.palette.lines.length];
    return {label, stroke: this.paints.dark ? dark : light, width: 1.6, dash: k >= this.paints.palette.lines.length ? [5, 3] : undefined};
  }

  panel(place, {title, height, x, y, data, series, unit = '', points = false, whole = false, alone = false}) {
    const p = this.paints, grid = {stroke: p.line, width: 1}, timeline = this.timeline;
    const write = (u, v) => (v === null || v === undefined ? '–' : `${whole ? v : v.toFixed(unit === 'W' ? 0 : 0)}${unit ? THIN + unit : ''}`);
    const options = {
      width: this.width(place), height, pxAlign: 1, legend: {live: true, isolate: false},
      padding: [20, 1, alone ? 0 : 6, 0],
      cursor: {y: false, drag: {x: true, y: false, setScale: alone}, points: {size: 6}},
      scales: {x: {time: false, ...(x ? {range: (u, min, max) => [min, max]} : {})}, y: {range: () => y}},
      axes: [
        alone
          ? {stroke: p.soft, grid, ticks: grid, size: 34, values: (u, ticks) => ticks.map((t) => instant(t, Math.abs(ticks[1] - ticks[0]) || 1e9))}
          : {show: false, grid},
        {stroke: p.soft, grid, ticks: {show: false}, size: GUTTER - 22, label: `${title}${unit ? ` (${unit})` : ''}`, labelSize: 22, gap: 6, font: '11px system-ui', labelFont: '12px system-ui', splits: whole ? (u) => ticksOf(y[1]) : undefined, space: 26},
      ],
      series: [{label: 'time', value: (u, v) => (v === null || v === undefined ? '–' : instant(v, alone ? 1e8 : 1e4))}, ...series.map((s) => ({value: write, points: {show: points, size: 5}, spanGaps: true, ...s}))],
      hooks: {},
    };
    if (alone) options.hooks.drawClear = [(u) => this.bands(u)];
    else {
      options.hooks.setCursor = [(u) => { if (u.cursor.event) { this.source = u; timeline.setCursor(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, 'x') : null); this.source = null; } }];
      options.hooks.setSelect = [(u) => {
        if (u.select.width < 3) return;
        timeline.setView(u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x'));
        u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
      }];
    }
    const u = new uPlot(options, data, place);
    u.root.setAttribute('role', 'img');
    u.root.setAttribute('aria-label', `${title} over time; figures are in the tables`);
    if (x) u.setScale('x', {min: x[0], max: x[1]});
    return u;
  }

  /** On the recording's own panels: the steady window and the window of the report. */
  bands(u) {
    const c = u.ctx, steady = this.words.steady;
    const band = (a, b, alpha, text) => {
      const from = Math.max(u.bbox.left, u.valToPos(a, 'x', true)), to = Math.min(u.bbox.left + u.bbox.width, Math.max(u.valToPos(b, 'x', true), u.valToPos(a, 'x', true) + 2));
      if (to <= from) return;
      c.save();
      c.globalAlpha = alpha;
      c.fillStyle = this.paints.accent;
      c.fillRect(from, u.bbox.top, to - from, u.bbox.height);
      c.globalAlpha = 1;
      c.fillStyle = this.paints.soft;
      c.font = `${11 * (window.devicePixelRatio || 1)}px system-ui`;
      c.textAlign = from + to > 2 * u.bbox.left + u.bbox.width * 1.7 ? 'right' : 'center';
      c.textBaseline = 'bottom';
      c.fillText(text, c.textAlign === 'right' ? to : (from + to) / 2, u.bbox.top + u.bbox.height - 3);
      c.restore();
    };
    if (steady) band(steady[0], steady[1], 0.1, 'steady window');
    band(0, this.timeline.recording.length, 0.45, 'this report');
  }
}

function ticksOf(top) {
  const step = Math.max(1, niceStep(top, 4)), out = [];
  for (let t = 0; t <= top; t += step) out.push(t);
  return out;
}
