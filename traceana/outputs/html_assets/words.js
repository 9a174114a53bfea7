// Words and small DOM helpers. Text from traces only ever enters through textContent.

const THIN = '\u202f';

/** Nanoseconds in the unit that fits, as the tables of the page write them. */
function duration(ns) {
  const size = Math.abs(ns);
  for (const [unit, name] of [[1e9, 's'], [1e6, 'ms'], [1e3, 'us']]) {
    if (size >= unit - unit / 2000) {
      const digits = Math.max(0, 3 - String(Math.floor(size / unit) || 1).length);
      return `${(ns / unit).toFixed(digits)}${THIN}${name}`;
    }
  }
  return `${Math.round(ns)}${THIN}ns`;
}

/** A point in time for an axis or a tooltip, with as many decimals of its unit as `step` asks for. */
function instant(ns, step) {
  const [unit, name] = step >= 1e9 ? [1e9, 's'] : step >= 1e4 ? [1e6, 'ms'] : [1e3, 'us'];
  const digits = Math.max(0, Math.min(name === 'us' ? 3 : 6, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  return `${(ns / unit).toLocaleString('en', {minimumFractionDigits: digits, maximumFractionDigits: digits})}${THIN}${name}`;
}

const exact = (ns) => `${Math.round(ns).toLocaleString('en')}${THIN}ns`;
const percent = (x) => `${(100 * x).toFixed(1)}${THIN}%`;

/** Element `tag` with a class and children (text or elements). */
function el(tag, name, ...children) {
  const out = document.createElement(tag);
  if (name) out.className = name;
  out.append(...children.filter((c) => c !== null && c !== undefined));
  return out;
}

/** A step of 1, 2 or 5 times a power of ten that puts at most `most` ticks on `span`. */
function niceStep(span, most) {
  const raw = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * (1 - 1e-9));
}
