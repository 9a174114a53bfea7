// Puts the page together: theme, timeline, panels, and the links from tables into the timeline.

const PAPER = 680; // CSS pixels between the margins of A4 and of letter

async function start() {
  const words = JSON.parse(document.getElementById('words').textContent);
  const paints = new Paints(words.palette), redraw = [], resize = [];
  const root = document.documentElement, button = document.getElementById('theme');
  const repaint = () => { paints.refresh(); redraw.forEach((f) => f()); };
  const label = () => { button.textContent = isDark() ? 'Light' : 'Dark'; };
  label();
  button.hidden = false;
  button.addEventListener('click', () => { root.dataset.theme = isDark() ? 'light' : 'dark'; label(); repaint(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { label(); repaint(); });
  // Paper is light and narrower than a screen; what was drawn is drawn again for it, and back afterwards.
  let before = null;
  const paper = (width) => { for (const f of resize) f(width); repaint(); };
  addEventListener('beforeprint', () => {
    before ??= {theme: root.dataset.theme};
    root.dataset.theme = 'light';
    for (const d of document.querySelectorAll('details[data-print]')) d.open = true;
    paper(PAPER);
  });
  addEventListener('afterprint', () => {
    if (before?.theme) root.dataset.theme = before.theme; else delete root.dataset.theme;
    before = null;
    paper(null);
  });

  const packed = document.getElementById('packed');
  if (!packed) return;
  const $ = (id) => document.getElementById(id);
  if (typeof DecompressionStream === 'undefined') {
    $('timeline-note').textContent = 'This browser cannot unpack the timeline: it lacks DecompressionStream (Chrome 80, Firefox 113, Safari 16.4 have it).';
    return;
  }
  const recording = new Recording(await unpack(packed.textContent), words.ranks);
  $('timeline-note').remove();
  $('timeline-body').hidden = false;
  const timeline = new Timeline($('timeline'), recording, paints);
  const panels = new Panels(timeline, paints, words, {linked: $('panels'), recording: $('recording'), none: $('no-samples')});
  const inspector = new Inspector(timeline, words, {tip: $('tip'), evidence: $('evidence'), live: $('live')});
  resize.push((width) => { timeline.fixed = width; timeline.resize(); }, (width) => { panels.fixed = width; });
  redraw.push(() => { timeline.paints.cache.clear(); timeline.draw(); }, () => panels.build());

  const act = {
    in: () => timeline.zoom(0.6), out: () => timeline.zoom(1 / 0.6), all: () => timeline.setView(0, recording.length),
    left: () => timeline.pan(-0.3), right: () => timeline.pan(0.3), next: () => inspector.step(1), previous: () => inspector.step(-1), frame: () => inspector.frame(),
  };
  for (const b of document.querySelectorAll('button[data-act]')) b.addEventListener('click', act[b.dataset.act]);
  for (const radio of document.querySelectorAll('input[name=colour]')) {
    radio.checked = radio.value === timeline.colourBy;
    if (radio.value === 'slot' && !recording.forwards.size) radio.disabled = true;
    radio.addEventListener('change', () => { timeline.colourBy = radio.value; $('legend-slot').hidden = radio.value !== 'slot'; $('legend-class').hidden = radio.value === 'slot'; timeline.request(); });
  }
  $('legend-slot').hidden = timeline.colourBy !== 'slot';
  $('legend-class').hidden = timeline.colourBy === 'slot';
  for (const b of document.querySelectorAll('button[data-rank]')) {
    b.hidden = false;
    b.addEventListener('click', () => {
      const row = recording.lanes.findIndex((lane) => lane.rank === Number(b.dataset.rank)), lane = recording.lanes[row];
      if (!lane) return;
      // From the gap's end back: its last nanosecond is idle, its first may be a copy of the scheduler.
      const i = indexAt(lane.starts, Number(b.dataset.end) - 1, lane.n);
      timeline.select(row, i);
      inspector.frame();
      $('timeline').scrollIntoView({block: 'center'});
      $('timeline').focus({preventScroll: true});
    });
  }
  inspector.show(null);
  root.dataset.ready = '1';
}

start();
