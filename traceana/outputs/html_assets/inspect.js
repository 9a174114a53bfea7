// Pointer and keyboard on the timeline, the tooltip, and the evidence of the chosen stretch.

class Inspector {
  constructor(timeline, words, box) {
    Object.assign(this, {timeline, words, tip: box.tip, evidence: box.evidence, live: box.live});
    const canvas = timeline.canvas;
    canvas.addEventListener('pointermove', (e) => this.move(e));
    canvas.addEventListener('pointerleave', () => this.leave());
    canvas.addEventListener('pointerdown', (e) => this.down(e));
    canvas.addEventListener('pointerup', (e) => this.up(e));
    canvas.addEventListener('dblclick', (e) => timeline.zoom(0.4, timeline.time(e.offsetX)));
    canvas.addEventListener('wheel', (e) => this.wheel(e), {passive: false});
    canvas.addEventListener('keydown', (e) => this.key(e));
    timeline.on('select', (selected) => this.show(selected));
    timeline.on('view', () => { this.tip.hidden = true; }); // it spoke of what was under the pointer before
  }

  /** What lies under a point: a stretch, and whether it is wide enough to mean it. */
  hit(x, y) {
    const t = this.timeline, row = t.laneAt(y);
    if (row < 0 || x < GUTTER) return null;
    const lane = t.recording.lanes[row], time = Math.min(Math.max(t.time(x), lane.starts[0]), lane.starts[lane.n] - 1);
    let i = indexAt(lane.starts, time, lane.n);
    const perPixel = (t.view[1] - t.view[0]) / t.plot;
    // In the strip of causes an idle stretch next to the pointer is meant, even where work is as close.
    if (y - t.top(row) > t.size.work) {
      const near = (k) => k >= 0 && k < lane.n && lane.code[k] > t.recording.classes && lane.code[k] !== MIXED
        && lane.starts[k] - time < 3 * perPixel && time - lane.starts[k + 1] < 3 * perPixel;
      i = [i, i + 1, i - 1].find(near) ?? i;
    }
    return {row, lane, i, time, wide: lane.starts[i + 1] - lane.starts[i] >= 1.5 * perPixel, perPixel};
  }

  move(e) {
    const t = this.timeline;
    if (this.drag) {
      const dx = e.offsetX - this.drag.x;
      if (Math.abs(dx) > 3) this.drag.moved = true;
      if (this.drag.overview) this.centre(e.offsetX);
      else if (this.drag.moved) {
        const per = (this.drag.view[1] - this.drag.view[0]) / t.plot;
        t.setView(this.drag.view[0] - dx * per, this.drag.view[1] - dx * per);
      }
    }
    const hit = this.hit(e.offsetX, e.offsetY);
    t.setCursor(e.offsetX >= GUTTER ? t.time(e.offsetX) : null);
    if (!hit || this.drag?.moved) this.tip.hidden = true;
    else this.showTip(hit, e.offsetX, e.offsetY);
  }

  leave() {
    this.tip.hidden = true;
    this.timeline.setCursor(null);
  }

  down(e) {
    if (e.button !== 0) return;
    const t = this.timeline, overview = e.offsetY > t.height - OVERVIEW;
    this.drag = {x: e.offsetX, view: [...t.view], moved: false, overview};
    t.canvas.setPointerCapture?.(e.pointerId);
    if (overview) this.centre(e.offsetX);
  }

  up(e) {
    const drag = this.drag;
    this.drag = null;
    if (!drag || drag.moved || drag.overview) return;
    const hit = this.hit(e.offsetX, e.offsetY);
    if (hit) this.timeline.select(hit.row, hit.i);
  }

  centre(x) {
    const t = this.timeline, time = (x - GUTTER) / t.plot * t.recording.length, half = (t.view[1] - t.view[0]) / 2;
    t.setView(time - half, time + half);
  }

  wheel(e) {
    const t = this.timeline;
    if (e.ctrlKey || e.metaKey) {
      e.preventDefault();
      t.zoom(Math.exp(e.deltaY * (e.deltaMode ? 0.05 : 0.0025)), t.time(Math.max(GUTTER, e.offsetX)));
    } else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      e.preventDefault();
      t.pan((e.shiftKey ? e.deltaY || e.deltaX : e.deltaX) / t.plot);
    }
  }

  key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const t = this.timeline, lanes = t.recording.lanes.length;
    const actions = {
      ArrowLeft: () => t.pan(-0.15), ArrowRight: () => t.pan(0.15), a: () => t.pan(-0.15), d: () => t.pan(0.15),
      '+': () => t.zoom(0.6), '=': () => t.zoom(0.6), w: () => t.zoom(0.6), '-': () => t.zoom(1 / 0.6), s: () => t.zoom(1 / 0.6),
      0: () => t.setView(0, t.recording.length), Home: () => t.setView(0, t.recording.length),
      ArrowUp: () => this.toLane(Math.max(0, t.lane - 1)), ArrowDown: () => this.toLane(Math.min(lanes - 1, t.lane + 1)),
      n: () => this.step(1), p: () => this.step(-1), Enter: () => this.frame(), Escape: () => t.select(t.lane, null),
    };
    const action = actions[e.key];
    if (!action) return;
    e.preventDefault();
    action();
    if (!['n', 'p', 'Escape', 'ArrowUp', 'ArrowDown'].includes(e.key)) this.say(`${instant(t.view[0], 1000)} to ${instant(t.view[1], 1000)}`);
  }

  toLane(row) {
    this.timeline.lane = row;
    this.timeline.request();
    this.say(this.timeline.recording.lanes[row].name);
  }

  /** Choose the next (or previous) idle stretch of the lane that is wide enough to see. */
  step(direction) {
    const t = this.timeline, lane = t.recording.lanes[t.lane], least = 3 * (t.view[1] - t.view[0]) / t.plot;
    const chosen = t.selected?.lane === t.lane ? t.selected.index : null;
    let i = chosen ?? indexAt(lane.starts, direction > 0 ? t.view[0] : t.view[1], lane.n) - direction;
    const gap = chosen === null ? null : lane.gap[chosen];
    for (i += direction; i >= 0 && i < lane.n; i += direction) {
      const idle = lane.code[i] !== MIXED && lane.code[i] > t.recording.classes;
      if (!idle || lane.starts[i + 1] - lane.starts[i] < least || (gap !== null && gap >= 0 && lane.gap[i] === gap)) continue;
      t.select(t.lane, i);
      if (lane.starts[i] < t.view[0] || lane.starts[i + 1] > t.view[1]) {
        const half = (t.view[1] - t.view[0]) / 2, middle = (lane.starts[i] + lane.starts[i + 1]) / 2;
        t.setView(middle - half, middle + half);
      }
      return;
    }
    this.say('no further idle stretch that can be seen at this zoom');
  }

  /** Show the chosen gap and a third of its length on both sides. */
  frame() {
    const s = this.timeline.selected;
    if (!s) return;
    const a = s.chain[0].start, b = s.chain[s.chain.length - 1].end, edge = (b - a) / 3;
    this.timeline.setView(a - edge, b + edge);
  }

  say(text) { this.live.textContent = text; }

  showTip(hit, x, y) {
    const t = this.timeline;
    const [head, ...lines] = hit.wide ? this.stretchTip(t.recording.stretch(hit.lane, hit.i)) : this.columnTip(hit);
    this.tip.replaceChildren(head, ...lines);
    this.tip.hidden = false;
    const w = this.tip.offsetWidth, h = this.tip.offsetHeight, room = t.canvas.parentElement.clientWidth;
    this.tip.style.left = `${Math.max(4, x + 16 + w > room ? x - w - 14 : x + 16)}px`;
    this.tip.style.top = `${y + 18 + h > t.height + 60 ? Math.max(0, y - h - 12) : y + 18}px`;
  }

  word(name) { return this.words.labels[name] ?? name; }

  stretchTip(s) {
    const lines = [this.head(s.name, `${this.word(s.name)} · ${duration(s.end - s.start)}`)];
    const say = (term, text) => { if (text !== null && text !== undefined && text !== '') lines.push(this.line(term, text)); };
    say('where', `${s.lane.name}, ${instant(s.start, 1)} from the window's start`);
    if (s.parts) say('holds', s.parts.map((p) => `${this.word(this.timeline.recording.codes[p.code])} ${duration(p.ns)} (${p.stretches})`).join(', '));
    if (s.idle) {
      say('means', this.words.meanings[s.name]);
      say('root', s.root === null ? null : this.words.ranks[s.root] ?? `rank ${s.root}`);
      say('detail', s.detail);
      say('event', s.what);
      say('waits for', s.visit === null ? null : `micro-batch step ${s.visit}`);
      if (s.crossed) say('token return', 'crossed: no other micro-batch was there to run');
      say('part of', this.gapText(s));
    } else if (s.visit !== null) say('step', this.stepText(s));
    return lines;
  }

  stepText(s) {
    const f = s.forward;
    if (!f) return `${s.visit}`;
    return `${s.visit}, slot ${f.slot < 0 ? 'unknown' : f.slot}, ${f.mode ?? 'mode unknown'}, ${f.batch} requests; forward ${duration(f.end - f.start)}, `
      + `${duration(f.busy)} of it at work, ${f.graphs > 0 ? 'CUDA graph' : 'no CUDA graph'}, ${f.kernels} activities`;
  }

  gapText(s) {
    if (s.gap < 0) return null;
    const chain = this.timeline.recording.chain(s.lane, s.index), total = chain.reduce((sum, k) => sum + k.end - k.start, 0);
    return chain.length > 1 ? `an idle gap of ${duration(total)} in ${chain.length} stretches` : null;
  }

  head(name, text) { return el('div', 'tip-head', this.swatch(name), el('strong', '', text)); }

  line(term, text) { return el('div', 'tip-line', el('span', 'term', term), el('span', '', text)); }

  swatch(name) {
    const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg'), rect = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    svg.setAttribute('class', 'swatch');
    svg.setAttribute('aria-hidden', 'true');
    rect.setAttribute('width', '100%');
    rect.setAttribute('height', '100%');
    rect.setAttribute('class', `k-${name}`);
    svg.append(rect);
    return svg;
  }

  /** What a few pixels hold where stretches are narrower than that. */
  columnTip(hit) {
    const r = this.timeline.recording, a = Math.max(0, hit.time - 1.5 * hit.perPixel), b = Math.min(r.length, hit.time + 1.5 * hit.perPixel);
    const sums = r.sums(hit.lane, a, b, 1), lines = [el('div', 'tip-head', el('strong', '', `${hit.lane.name}, ${duration(b - a)} around ${instant(hit.time, Math.max(1, b - a))}`))];
    const parts = r.codes.map((name, k) => [name, sums[k]]).filter(([, ns]) => ns > 0).sort((p, q) => q[1] - p[1]);
    for (const [name, ns] of parts.slice(0, 6)) lines.push(el('div', 'tip-part', this.swatch(name), `${this.word(name)} ${percent(ns / (b - a))}`));
    const s = r.stretch(hit.lane, hit.i);
    if (s.visit !== null && !s.idle) lines.push(this.line('step', this.stepText(s)));
    lines.push(el('div', 'tip-more', 'zoom in for single stretches'));
    return lines;
  }

  /** The evidence of a selection: the stretch in words, and the chain of its gap as a table, time running down. */
  show(selected) {
    this.evidence.replaceChildren();
    if (!selected) { this.evidence.append(el('p', 'hint', this.words.hint)); this.say('nothing chosen'); return; }
    const s = selected.stretch, chain = selected.chain;
    if (!s.idle) {
      this.evidence.append(el('h3', '', `${s.lane.name}: ${this.word(s.name)}, ${exact(s.end - s.start)}`), ...this.stretchTip(s).slice(1));
      this.say(`${s.lane.name}, ${this.word(s.name)}, ${duration(s.end - s.start)}`);
      return;
    }
    const total = chain.reduce((sum, k) => sum + k.end - k.start, 0);
    this.evidence.append(el('h3', '', `${s.lane.name} is idle for ${exact(total)}${s.visit === null ? '' : `, awaiting micro-batch step ${s.visit}`}`));
    const body = el('tbody'), table = el('table', 'chain', el('caption', 'unseen', 'the chain of this gap, time running down'),
      el('thead', '', el('tr', '', ...['from the gap’s start', 'nanoseconds', 'cause', 'root', 'detail', 'event'].map((h) => { const th = el('th', '', h); th.scope = 'col'; return th; }))), body);
    for (const k of chain) {
      const row = el('tr', k.index === s.index ? 'chosen' : '', el('td', 'n', duration(k.start - chain[0].start)), el('td', 'n', Math.round(k.end - k.start).toLocaleString('en')),
        el('td', '', this.swatch(k.name), this.word(k.name), k.crossed ? el('span', 'mark', ' ↺') : null), el('td', '', k.root === null ? '–' : this.words.ranks[k.root] ?? `rank ${k.root}`),
        el('td', '', k.detail ?? '–'), el('td', '', k.what ?? '–'));
      body.append(row);
    }
    const holder = el('div', 'wide', table);
    holder.tabIndex = 0;
    holder.setAttribute('role', 'region');
    holder.setAttribute('aria-label', 'chain of the chosen gap');
    this.evidence.append(holder);
    if (chain.some((k) => k.crossed)) this.evidence.append(el('p', 'hint', '↺ beyond the token return (last stage to first): no other micro-batch was there to run.'));
    this.say(`${s.lane.name}, idle ${duration(total)}, here ${this.word(s.name)} ${duration(s.end - s.start)}${s.root === null ? '' : `, root ${this.words.ranks[s.root] ?? s.root}`}`);
  }
}
