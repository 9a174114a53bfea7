// The pipeline timeline: a lane for each rank, its work above and the causes of its idle time in the strip below.
// Every pixel column of a lane shows all of its time: the height of the fill is the share of it.

const AXIS = 24, OVERVIEW = 30, GUTTER = 104;

class Timeline {
  constructor(canvas, recording, paints) {
    Object.assign(this, {canvas, recording, paints, context: canvas.getContext('2d')});
    this.view = [0, recording.length];
    this.lane = 0;
    this.colourBy = recording.slots > 1 ? 'slot' : 'class';
    this.selected = null; // {lane, chain}
    this.cursor = null; // time under the pointer
    this.listeners = {view: [], cursor: [], hover: [], select: []};
    const n = recording.lanes.length;
    this.size = n > 12 ? {work: 16, strip: 7, gap: 8} : n > 4 ? {work: 36, strip: 13, gap: 14} : {work: 54, strip: 18, gap: 20};
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
    this.resize();
  }

  on(name, f) { this.listeners[name].push(f); }
  emit(name, value) { for (const f of this.listeners[name]) f(value); }

  get laneHeight() { return this.size.work + this.size.strip + this.size.gap; }
  get height() { return AXIS + this.recording.lanes.length * this.laneHeight + OVERVIEW; }
  get plot() { return Math.max(50, this.width - GUTTER); }
  top(lane) { return AXIS + lane * this.laneHeight; }
  x(time) { return GUTTER + (time - this.view[0]) / (this.view[1] - this.view[0]) * this.plot; }
  time(x) { return this.view[0] + (x - GUTTER) / this.plot * (this.view[1] - this.view[0]); }
  laneAt(y) {
    const lane = Math.floor((y - AXIS) / this.laneHeight);
    return y >= AXIS && lane >= 0 && lane < this.recording.lanes.length ? lane : -1;
  }

  resize() {
    this.width = this.fixed ?? Math.max(280, this.canvas.parentElement.clientWidth);
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.paints.cache.clear();
    this.draw();
  }

  /** Show [a, b): kept inside the window, at least 200 ns long. */
  setView(a, b) {
    const whole = this.recording.length, span = Math.min(whole, Math.max(200, b - a));
    const middle = (a + b) / 2, start = Math.min(Math.max(0, middle - span / 2), whole - span);
    this.view = [start, start + span];
    Object.assign(this.canvas.dataset, {from: String(start), to: String(start + span)}); // for scripts and tests
    this.request();
    this.emit('view', this.view);
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const [a, b] = this.view, span = (b - a) * factor, part = (around - a) / (b - a);
    const kept = Math.min(this.recording.length, Math.max(200, span));
    this.setView(around - part * kept, around - part * kept + kept);
  }

  pan(part) {
    const span = this.view[1] - this.view[0];
    this.setView(this.view[0] + part * span, this.view[1] + part * span);
  }

  setCursor(time) {
    if (time === this.cursor) return;
    this.cursor = time;
    this.request();
    this.emit('cursor', time);
  }

  /** Choose the stretch `i` of lane `lane`: its gap's chain is drawn and handed to whoever shows evidence. */
  select(lane, i) {
    const at = this.recording.lanes[lane];
    this.lane = lane;
    this.selected = i === null ? null : {lane, index: i, chain: this.recording.chain(at, i), stretch: this.recording.stretch(at, i)};
    this.request();
    this.emit('select', this.selected);
  }

  request() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  draw() {
    const c = this.context, p = this.paints;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    c.font = '12px system-ui, sans-serif';
    c.textBaseline = 'middle';
    this.drawAxis(c, p);
    this.recording.lanes.forEach((lane, row) => this.drawLane(c, p, lane, row));
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, this.plot, this.height - OVERVIEW);
    c.clip();
    this.drawMessages(c, p);
    this.drawChain(c, p);
    this.drawCursor(c, p);
    c.restore();
    this.drawOverview(c, p);
  }

  drawAxis(c, p) {
    const [a, b] = this.view, step = niceStep(b - a, Math.floor(this.plot / 110));
    c.textAlign = 'center';
    for (let t = Math.ceil(a / step) * step; t <= b; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      c.strokeStyle = p.line;
      c.beginPath();
      c.moveTo(x, AXIS - 5);
      c.lineTo(x, this.height - OVERVIEW - this.size.gap);
      c.stroke();
      c.fillStyle = p.soft;
      const text = instant(t, step), half = c.measureText(text).width / 2;
      c.fillText(text, Math.min(Math.max(x, GUTTER + half), this.width - half), AXIS / 2 - 2);
    }
  }

  drawLane(c, p, lane, row) {
    const y = this.top(row), {work, strip} = this.size;
    c.textAlign = 'right';
    c.fillStyle = row === this.lane ? p.ink : p.soft;
    c.font = `${row === this.lane ? 600 : 400} ${work > 20 ? 13 : 11}px system-ui, sans-serif`;
    c.fillText(this.clip(c, lane.name, GUTTER - 14), GUTTER - 10, y + work / 2);
    c.fillStyle = p.sunk;
    c.fillRect(GUTTER, y, this.plot, work);
    const n = Math.max(1, Math.round(this.plot * Math.min(2, this.ratio)));
    const sums = this.recording.sums(lane, this.view[0], this.view[1], n);
    this.drawColumns(c, p, sums, n, y);
    this.drawForwards(c, p, lane, y);
    if (row === this.lane) {
      c.fillStyle = p.accent;
      c.fillRect(GUTTER - 5, y, 3, work + strip);
    }
  }

  clip(c, text, room) {
    if (c.measureText(text).width <= room) return text;
    let n = text.length;
    while (n > 1 && c.measureText(`${text.slice(0, n)}…`).width > room) n--;
    return `${text.slice(0, n)}…`;
  }

  /** Columns of equal composition are drawn as one, and all of one colour together. */
  drawColumns(c, p, sums, n, y) {
    const r = this.recording, w = r.width, cell = this.plot / n, {work, strip} = this.size, grain = Math.max(1, this.ratio);
    const bySlot = this.colourBy === 'slot', rects = new Map();
    const put = (style, x, top, width, height) => {
      if (!rects.has(style)) rects.set(style, []);
      rects.get(style).push(x, top, width, height);
    };
    let from = 0, last = null;
    const flush = (to) => {
      if (!last) return;
      const x = GUTTER + from * cell, width = (to - from) * cell;
      for (let k = 0, base = y + work; k < last.work.length; k += 2) { base -= last.work[k + 1]; put(last.work[k], x, base, width, last.work[k + 1]); }
      for (let k = 0, base = y + work + 1; k < last.idle.length; k += 2) { put(last.idle[k], x, base, width, last.idle[k + 1]); base += last.idle[k + 1]; }
    };
    const scale = r.length > 0 ? (this.view[1] - this.view[0]) / n : 1;
    for (let k = 0; k <= n; k++) {
      const now = k < n ? {work: [], idle: []} : null;
      if (now) {
        const at = k * w, [a, b] = bySlot ? [r.kinds, r.width] : [0, r.classes];
        for (let j = a; j < b; j++) this.share(now.work, j, sums[at + j], scale, work, grain);
        this.share(now.work, r.classes, sums[at + r.classes], scale, work, grain);
        for (let j = r.classes + 1; j < r.kinds; j++) this.share(now.idle, j, sums[at + j], scale, strip, grain);
        if (last && same(now.work, last.work) && same(now.idle, last.idle)) continue;
      }
      flush(k);
      from = k;
      last = now;
    }
    for (const [style, list] of rects) {
      c.fillStyle = style < r.kinds ? p.fill(c, r.codes[style]) : p.slot(style - r.kinds).fill;
      for (let k = 0; k < list.length; k += 4) c.fillRect(list[k], list[k + 1], list[k + 2], list[k + 3]);
    }
  }

  share(out, style, ns, whole, room, grain) {
    if (ns <= 0) return;
    const height = Math.round(Math.min(1, ns / whole) * room * grain) / grain;
    if (height > 0) out.push(style, height);
  }

  drawForwards(c, p, lane, y) {
    const {work} = this.size, [a, b] = this.view;
    if (work < 20) return;
    c.textAlign = 'left';
    c.font = '11px system-ui, sans-serif';
    for (const f of lane.forwards) {
      if (f.end <= a || f.start >= b) continue;
      const left = Math.max(this.x(f.start), GUTTER), right = Math.min(this.x(f.end), this.width), room = right - left;
      if (room < 5) continue;
      const slot = p.slot(f.slot < 0 ? SLOT_COLOURS : f.slot % SLOT_COLOURS);
      c.fillStyle = this.colourBy === 'slot' ? slot.fill : p.soft;
      c.fillRect(left, y - 3, room - 1, 2);
      const texts = [`slot ${f.slot < 0 ? '?' : f.slot} · ${f.mode ?? 'step'} · ${f.batch} request${f.batch === 1 ? '' : 's'} · #${f.visit}`, `slot ${f.slot} · ×${f.batch}`, `s${f.slot} ×${f.batch}`, `s${f.slot}`];
      const text = (f.slot < 0 ? texts.slice(0, 1) : texts).find((t) => c.measureText(t).width + 8 <= room);
      if (!text) continue;
      const width = c.measureText(text).width;
      c.fillStyle = this.colourBy === 'slot' ? slot.fill : p.page;
      c.fillRect(left + 2, y + work - 16, width + 5, 14);
      c.fillStyle = this.colourBy === 'slot' ? slot.ink : p.ink;
      c.fillText(text, left + 4, y + work - 8.5);
    }
  }

  drawMessages(c, p) {
    const [a, b] = this.view, seen = this.recording.messages.filter((m) => m.taken > a && m.sent < b && m.from !== m.to);
    if (seen.length === 0 || seen.length * 14 > this.plot) return;
    c.strokeStyle = p.ink;
    c.fillStyle = p.ink;
    c.lineWidth = 1;
    for (const m of seen) {
      const down = m.to > m.from, y0 = this.top(m.from) + (down ? this.size.work : 0), y1 = this.top(m.to) + (down ? 0 : this.size.work);
      const x0 = this.x(m.sent), x1 = this.x(m.taken);
      c.globalAlpha = 0.55;
      c.setLineDash(m.kind === 'output' ? [3, 3] : []);
      c.beginPath();
      c.moveTo(x0, y0);
      c.lineTo(x1, y1);
      c.stroke();
      c.beginPath();
      c.arc(x1, y1, 2.2, 0, 7);
      c.fill();
    }
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  /** The path of blame of the chosen gap: each stretch on the lane of the stage that is the reason for it. */
  drawChain(c, p) {
    if (!this.selected) return;
    const rows = new Map(this.recording.lanes.map((lane, i) => [lane.rank, i])), {work, strip} = this.size;
    const chain = this.selected.chain, own = this.selected.lane;
    const left = this.x(chain[0].start), right = this.x(chain[chain.length - 1].end);
    c.strokeStyle = p.ink;
    c.lineWidth = 1.5;
    c.strokeRect(left - 1, this.top(own) - 1.5, Math.max(3, right - left + 2), work + strip + 4);
    c.lineWidth = 5;
    const path = () => {
      c.beginPath();
      let before = null, row = own;
      for (const s of chain) {
        row = rows.get(s.root) ?? row; // where the root is not known the path stays where it was
        const y = this.top(row) + work / 2, x0 = this.x(s.start), x1 = this.x(s.end);
        if (before === null) c.moveTo(x0, y); else if (x0 - before > 2) c.moveTo(x0, y); else c.lineTo(x0, y);
        c.lineTo(x1, y);
        before = x1;
      }
      c.stroke();
    };
    c.lineJoin = 'round';
    c.strokeStyle = p.page;
    path();
    c.lineWidth = 2;
    c.strokeStyle = p.ink;
    path();
    c.lineWidth = 1;
  }

  drawCursor(c, p) {
    if (this.cursor === null || this.cursor < this.view[0] || this.cursor > this.view[1]) return;
    const x = Math.round(this.x(this.cursor)) + 0.5;
    c.strokeStyle = p.soft;
    c.setLineDash([4, 3]);
    c.beginPath();
    c.moveTo(x, AXIS - 4);
    c.lineTo(x, this.height - OVERVIEW - 6);
    c.stroke();
    c.setLineDash([]);
  }

  /** The whole window in small, how many stages work, and where the view lies in it. */
  drawOverview(c, p) {
    const y = this.height - OVERVIEW + 4, h = OVERVIEW - 8, r = this.recording, step = 2, n = Math.max(1, Math.floor(this.plot / step));
    c.fillStyle = p.sunk;
    c.fillRect(GUTTER, y, this.plot, h);
    if (!this.overview || this.overview.length !== n) {
      this.overview = new Float32Array(n);
      for (const lane of r.lanes) {
        const sums = r.sums(lane, 0, r.length, n);
        for (let k = 0; k < n; k++) for (let j = 0; j < r.classes; j++) this.overview[k] += sums[k * r.width + j];
      }
    }
    c.fillStyle = p.faint;
    const whole = r.length / n * r.lanes.length;
    for (let k = 0; k < n; k++) {
      const height = Math.min(1, this.overview[k] / whole) * h;
      c.fillRect(GUTTER + k * this.plot / n, y + h - height, this.plot / n + 0.3, height);
    }
    const a = GUTTER + this.view[0] / r.length * this.plot, b = GUTTER + this.view[1] / r.length * this.plot;
    c.fillStyle = p.accent;
    c.globalAlpha = 0.18;
    c.fillRect(a, y, Math.max(3, b - a), h);
    c.globalAlpha = 1;
    c.strokeStyle = p.accent;
    c.strokeRect(a + 0.5, y + 0.5, Math.max(3, b - a - 1), h - 1);
    c.textAlign = 'right';
    c.fillStyle = p.soft;
    c.font = '11px system-ui, sans-serif';
    c.fillText('whole window', GUTTER - 10, y + h / 2);
  }
}

function same(a, b) {
  if (a.length !== b.length) return false;
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false;
  return true;
}
