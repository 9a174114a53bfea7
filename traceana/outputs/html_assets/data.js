// The packed columns (see html_pack.py) and the lanes made from them.

/** base64 of a zlib stream -> {columns: {name: Float64Array}, facts}. Needs no network: the browser inflates. */
async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream('deflate'));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(raw.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + size)));
  const columns = {};
  let at = 4 + size;
  for (const {name, n, base, planes, delta} of header.columns) {
    columns[name] = column(raw, at, n, base, planes, delta);
    at += n * planes;
  }
  return {columns, facts: header.facts};
}

// Plain functions: loops over a million bytes are compiled sooner there than in an async one.
function bytesOf(text) {
  const binary = atob(text), n = binary.length, bytes = new Uint8Array(n);
  for (let i = 0; i < n; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** One column: a plane of bytes for each power of 256, least first, above `base`; `delta`: differences. */
function column(raw, at, n, base, planes, delta) {
  const values = new Float64Array(n).fill(base);
  for (let plane = 0, unit = 1; plane < planes; plane++, unit *= 256, at += n) {
    for (let i = 0; i < n; i++) values[i] += raw[at + i] * unit;
  }
  if (delta) for (let i = 1; i < n; i++) values[i] += values[i - 1];
  return values;
}

const MIXED = 255;
const SLOT_COLOURS = 8;

/** The last index whose start is at or before `time`; 0 before all. */
function indexAt(starts, time, n) {
  let lo = 0, hi = n - 1;
  while (lo < hi) {
    const mid = (lo + hi + 1) >> 1;
    if (starts[mid] <= time) lo = mid; else hi = mid - 1;
  }
  return lo;
}

/** Everything the drawings read: lanes (one a rank), forwards, messages, counters; times in ns from the window's start. */
class Recording {
  constructor({columns, facts}, names) {
    Object.assign(this, {columns, facts, length: facts.window_ns, codes: facts.codes, classes: facts.classes});
    this.strings = facts.strings;
    this.kinds = this.codes.length;
    this.width = this.kinds + SLOT_COLOURS + 1; // nanoseconds by code, then of work by slot colour, the last without slot
    this.forwards = this.readForwards();
    this.bins = facts.ranks.length > 16 ? 4096 : 16384; // sums made once, for views that hold too many stretches
    this.slots = new Set(columns.f_slot).size;
    this.parts = this.readParts();
    let mixed = 0;
    this.lanes = facts.ranks.map((rank) => {
      const lane = this.lane(rank, names[rank] ?? `rank ${rank}`, mixed);
      mixed = lane.nextMixed;
      return lane;
    });
    this.messages = this.readMessages();
  }

  readForwards() {
    const c = this.columns, out = new Map();
    for (let i = 0; i < (c.f_rank?.length ?? 0); i++) {
      const rank = c.f_rank[i];
      if (!out.has(rank)) out.set(rank, []);
      out.get(rank).push({
        start: c.f_start[i], end: c.f_start[i] + c.f_length[i], visit: c.f_visit[i], slot: c.f_slot[i],
        mode: this.facts.modes[c.f_mode[i]] ?? null, batch: c.f_batch_size[i], tokens: c.f_tokens[i], busy: c.f_busy_ns[i],
        launch: c.f_launch_ns[i], graphs: c.f_graphs[i], kernels: c.f_kernels[i],
      });
    }
    return out;
  }

  readParts() {
    const c = this.columns, out = [];
    for (let i = 0; i < (c.part_mixed?.length ?? 0); i++) {
      (out[c.part_mixed[i]] ??= []).push({code: c.part_code[i], ns: c.part_ns[i], stretches: c.part_stretches[i]});
    }
    return out;
  }

  readMessages() {
    const c = this.columns, row = new Map(this.lanes.map((lane, i) => [lane.rank, i])), out = [];
    for (let i = 0; i < (c.m_src?.length ?? 0); i++) {
      if (!row.has(c.m_src[i]) || !row.has(c.m_dst[i])) continue;
      out.push({
        from: row.get(c.m_src[i]), to: row.get(c.m_dst[i]), kind: this.facts.kinds[c.m_kind[i]], visit: c.m_visit[i], bytes: c.m_bytes[i],
        sent: c.m_send_ts_ns[i], taken: c.m_recv_end_ns[i],
      });
    }
    return out;
  }

  lane(rank, name, firstMixed) {
    const c = this.columns, lengths = c[`length${rank}`], n = lengths.length;
    const starts = new Float64Array(n + 1);
    starts[0] = c[`start${rank}`][0] ?? 0;
    for (let i = 0; i < n; i++) starts[i + 1] = starts[i] + lengths[i];
    const forwards = this.forwards.get(rank) ?? [];
    const slotOf = new Map(forwards.map((f) => [f.visit, f.slot]));
    const lane = {
      rank, name, n, starts, code: Uint8Array.from(c[`code${rank}`]), visit: Int32Array.from(c[`visit${rank}`]),
      gap: Int32Array.from(c[`gap${rank}`]), evidence: Int32Array.from(c[`evidence${rank}`]), forwards, slotOf,
    };
    // Which mixed stretch is the k-th of all: they are counted over the lanes in order.
    let mixed = firstMixed;
    lane.mixed = new Map();
    for (let i = 0; i < n; i++) if (lane.code[i] === MIXED) lane.mixed.set(i, mixed++);
    lane.nextMixed = mixed;
    lane.bins = this.sums(lane, 0, this.length, this.bins, false);
    return lane;
  }

  /** Which colour work of a micro-batch step has: its slot's, or the last where the slot is unknown. */
  slotColour(lane, visit) {
    const slot = lane.slotOf.get(visit) ?? -1;
    return slot < 0 ? SLOT_COLOURS : slot % SLOT_COLOURS;
  }

  /** Nanoseconds by code and by slot colour in each of `n` equal cells of [t0, t1): Float32Array(n * width). */
  sums(lane, t0, t1, n, fromBins = true) {
    const out = new Float32Array(n * this.width), cell = (t1 - t0) / n, binSize = this.length / this.bins;
    const first = indexAt(lane.starts, t0, lane.n), last = indexAt(lane.starts, t1, lane.n);
    if (fromBins && last - first > 20000 && cell >= binSize) return this.sumsOfBins(lane, t0, t1, n, out);
    let lastVisit = NaN, colour = SLOT_COLOURS;
    for (let i = first; i <= last; i++) {
      const a = Math.max(lane.starts[i], t0), b = Math.min(lane.starts[i + 1], t1);
      if (b <= a) continue;
      if (lane.visit[i] !== lastVisit) colour = this.slotColour(lane, lastVisit = lane.visit[i]);
      const code = lane.code[i], from = Math.floor((a - t0) / cell), to = Math.min(n - 1, Math.floor((b - t0) / cell));
      for (let k = from; k <= to; k++) {
        const ns = Math.min(b, t0 + (k + 1) * cell) - Math.max(a, t0 + k * cell);
        if (ns > 0) this.put(out, k * this.width, code, ns, colour, lane, i);
      }
    }
    return out;
  }

  put(out, at, code, ns, colour, lane, i) {
    if (code !== MIXED) {
      out[at + code] += ns;
      if (code < this.classes) out[at + this.kinds + colour] += ns;
      return;
    }
    const whole = lane.starts[i + 1] - lane.starts[i];
    for (const part of this.parts[lane.mixed.get(i)]) this.put(out, at, part.code, ns * part.ns / whole, colour);
  }

  sumsOfBins(lane, t0, t1, n, out) {
    const size = this.length / this.bins, cell = (t1 - t0) / n, w = this.width;
    for (let bin = Math.max(0, Math.floor(t0 / size)); bin < Math.min(this.bins, Math.ceil(t1 / size)); bin++) {
      const a = Math.max(bin * size, t0), b = Math.min((bin + 1) * size, t1);
      for (let k = Math.floor((a - t0) / cell); k <= Math.min(n - 1, Math.floor((b - t0) / cell)); k++) {
        const part = (Math.min(b, t0 + (k + 1) * cell) - Math.max(a, t0 + k * cell)) / size;
        if (part <= 0) continue;
        for (let j = 0; j < w; j++) out[k * w + j] += lane.bins[bin * w + j] * part;
      }
    }
    return out;
  }

  /** What is known of stretch `i` of a lane. */
  stretch(lane, i) {
    const c = this.columns, code = lane.code[i], e = lane.evidence[i], text = (k) => (k >= 0 ? this.strings[k] : null);
    const visit = lane.visit[i] >= 0 ? lane.visit[i] : null;
    return {
      index: i, lane, code, name: code === MIXED ? 'mixed' : this.codes[code], start: lane.starts[i], end: lane.starts[i + 1], visit,
      idle: code !== MIXED && code > this.classes, gap: lane.gap[i], detail: text(c.detail[e]), what: text(c.what[e]),
      root: c.root[e] >= 0 ? c.root[e] : null, crossed: c.crossed[e] === 1,
      forward: visit === null ? null : lane.forwards.find((f) => f.visit === visit) ?? null,
      parts: code === MIXED ? this.parts[lane.mixed.get(i)] : null,
    };
  }

  /** The stretches of the gap that stretch `i` belongs to, in time order: the chain, cut to the idle time. */
  chain(lane, i) {
    const gap = lane.gap[i], member = (k) => lane.code[k] !== MIXED && lane.code[k] > this.classes && lane.gap[k] === gap;
    if (gap < 0 || !member(i)) return [this.stretch(lane, i)];
    let lo = i, hi = i;
    while (lo > 0 && lane.gap[lo - 1] === gap) lo--;
    while (hi + 1 < lane.n && lane.gap[hi + 1] === gap) hi++;
    const out = [];
    for (let k = lo; k <= hi; k++) if (member(k)) out.push(this.stretch(lane, k));
    return out;
  }
}
