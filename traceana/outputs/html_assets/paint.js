// Colours of the theme in force, and the pattern fills of the canvas.

/** Whether the page is dark now: the reader's choice, else the system's. */
function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

class Paints {
  constructor(palette) {
    this.palette = palette;
    this.byName = new Map(palette.paints.map((p) => [p.name, p]));
    this.refresh();
  }

  /** Read the theme again; fills are made when first asked for. */
  refresh() {
    this.dark = isDark();
    this.cache = new Map();
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.ink = read('--ink');
    this.soft = read('--soft');
    this.faint = read('--faint');
    this.line = read('--line');
    this.sunk = read('--sunk');
    this.page = read('--page');
    this.accent = read('--accent');
  }

  colour(name) {
    const paint = this.byName.get(name);
    return paint ? (this.dark ? paint.dark : paint.light) : this.soft;
  }

  /** The fill of a class or cause on `context`: a colour, or a pattern of 6 x 6 CSS pixels. */
  fill(context, name) {
    if (!this.cache.has(name)) this.cache.set(name, this.make(context, name));
    return this.cache.get(name);
  }

  make(context, name) {
    const paint = this.byName.get(name), colour = this.colour(name);
    if (!paint || paint.pattern === 'solid') return colour;
    const scale = window.devicePixelRatio || 1, size = Math.max(6, Math.round(6 * scale));
    const tile = el('canvas');
    tile.width = tile.height = size;
    const t = tile.getContext('2d');
    t.scale(size / 6, size / 6);
    t.fillStyle = colour;
    t.fillRect(0, 0, 6, 6);
    t.strokeStyle = this.dark ? 'rgba(0,0,0,.55)' : 'rgba(255,255,255,.75)';
    t.lineWidth = 1.3;
    t.stroke(new Path2D(this.palette.patterns[paint.pattern]));
    const pattern = context.createPattern(tile, 'repeat');
    pattern.setTransform(new DOMMatrix().scale(6 / size));
    return pattern;
  }

  slot(colour) {
    return colour < SLOT_COLOURS ? this.palette.slots[colour] : {fill: this.faint, ink: this.ink};
  }
}
