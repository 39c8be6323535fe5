// Marks as SVG text: numbers, colours, axes. Drawings fill the room they have, in the page's type.

const fixed = (x, digits) =>
  Math.abs(x) >= 0.5 * 10 ** -digits || x === 0
    ? x.toFixed(digits).replace(/^-([0.]+)$/, "$1")
    : x.toExponential(1);
const show = (x, digits = 3) => (there(x) ? fixed(x, digits).replaceAll("-", "−") : "N/A");
const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);
const escaped = (words) => String(words).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const round = (x) => Math.round(x * 100) / 100;
const at = (name) => `class="${name}"`;
const rect = (x, y, w, h, more) =>
  `<rect x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" ${more}/>`;
const text = (x, y, words, name = "") =>
  `<text x="${round(x)}" y="${round(y)}" ${at(name)}>${escaped(words)}</text>`;
// The path of one rectangle; many of one colour are one path.
const box = (x, y, w, h) => `M${round(x)} ${round(y)}h${round(w)}v${round(h)}h${-round(w)}z`;
const line = (path, name) => `<path d="${path}" ${at(name)}/>`;
const upright = (x, y, words) =>
  `<text transform="translate(${round(x)} ${round(y)}) rotate(-90)" class="middle">${escaped(words)}</text>`;

// -- colours -----------------------------------------------------------------------------------------

const SHADES = 250;

// Anchors "rrggbb ..." -> SHADES colours between them
function shadesOf(anchors) {
  const rgb = anchors.split(" ").map((a) => [0, 2, 4].map((k) => parseInt(a.slice(k, k + 2), 16)));
  return Array.from({ length: SHADES }, (_, s) => {
    const x = (s / (SHADES - 1)) * (rgb.length - 1),
      i = Math.min(rgb.length - 2, Math.floor(x));
    return `rgb(${rgb[i].map((c, k) => Math.round(c + (rgb[i + 1][k] - c) * (x - i))).join(",")})`;
  });
}

const RED_BLUE = shadesOf("053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f");
const VIRIDIS = shadesOf("440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725");

// Index of the colour
function shadeOf(x, scale) {
  const share = scale.high > scale.low ? (x - scale.low) / (scale.high - scale.low) : 0.5;
  return Math.round(Math.min(1, Math.max(0, share)) * (SHADES - 1));
}

// Coloured cells, one path for each colour; undefined is left out, null is grey.
function grid(values, columns, x, y, w, h, scale, name = "") {
  const paths = new Map(),
    absent = [];
  values.forEach((value, k) => {
    if (value === undefined) return;
    // A little larger than the cell, so that no ground shows between two
    const cell = box(x + (k % columns) * w, y + Math.floor(k / columns) * h, w + 0.3, h + 0.3);
    if (value === null) {
      absent.push(cell);
      return;
    }
    const shade = shadeOf(value, scale);
    if (!paths.has(shade)) paths.set(shade, []);
    paths.get(shade).push(cell);
  });
  const drawn = [...paths].map(
    ([shade, cells]) => `<path d="${cells.join("")}" fill="${scale.shades[shade]}"/>`,
  );
  const grey = absent.length ? line(absent.join(""), "absent") : "";
  return `<g class="cells ${name}">${grey}${drawn.join("")}</g>`;
}

// The unit above, the ends below
function colorBar(x, y, w, scale, unit) {
  let out = text(x + w / 2, y, unit, "middle");
  for (let i = 0; i < 50; i++) {
    out += rect(
      x + (i * w) / 50,
      y + 5,
      w / 50 + 0.5,
      9,
      `fill="${scale.shades[Math.floor(((i + 0.5) / 50) * SHADES)]}"`,
    );
  }
  return out + text(x, y + 26, show(scale.low, 2)) + text(x + w, y + 26, show(scale.high, 2), "end");
}

// -- scales ------------------------------------------------------------------------------------------

function percentile(sorted, p) {
  const x = p * (sorted.length - 1),
    i = Math.floor(x),
    next = sorted[Math.min(i + 1, sorted.length - 1)];
  return sorted[i] + (x - i) * (next - sorted[i]);
}

const around = (edge) => ({ low: -edge, high: edge, shades: RED_BLUE });

// Ends at the 2nd and 98th percentile
function mapScale(m) {
  if (m.scale === "share") return { low: 0, high: 1, shades: VIRIDIS };
  const values = m.values
    .flat()
    .filter(there)
    .sort((a, b) => a - b);
  const low = percentile(values, 0.02),
    high = percentile(values, 0.98);
  return m.scale === "diverging"
    ? around(Math.max(Math.abs(low), Math.abs(high)))
    : { low, high, shades: VIRIDIS };
}

// Lowest and highest number of a head, of its layer or of all heads
function scaledWith(coded, i, j) {
  const pick = (rows) =>
    state.scale === "head" ? [rows[i][j]] : state.scale === "layer" ? rows[i] : rows.flat();
  return [Math.min(...pick(coded.low)), Math.max(...pick(coded.high))];
}

const SCALED = {
  head: "on its own scale",
  layer: "on one scale, that of the layer",
  all: "on one scale, that of all heads",
};

// Colours of a quantity: around 0 for logits, from 0 for masses
function matrixScale(low, high) {
  return state.quantity === "mean_logit"
    ? around(Math.max(-low, high, 1e-12))
    : { low: 0, high: high || 1, shades: VIRIDIS };
}

// -- axes and bars -----------------------------------------------------------------------------------

function ticks(n, room) {
  const step = [1, 2, 3, 5, 6, 10, 12, 20, 25, 50, 100].find((s) => n / s <= room) ?? n;
  return Array.from({ length: Math.ceil(n / step) }, (_, i) => i * step);
}

// Round numbers between two, and how many digits they need
function levels(low, high, room = 5) {
  const span = high - low || 1,
    raw = span / room,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw),
    out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9 * span; v += step)
    out.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return [out, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}

// From 0, with the noise frames shaded; those of the columns from averaged on are averages of gone frames
function bars(profile, x, y, w, h, [low, high], noise = pass().noise, columns = C, averaged = F) {
  const scale = high > low ? h / (high - low) : 0,
    zero = y + high * scale,
    step = w / columns;
  let out =
    noise.length && noise.length < F ? rect(x + noise[0] * step, y, noise.length * step, h, at("noise")) : "";
  let up = "",
    down = "",
    means = "",
    absent = "";
  profile.forEach((v, f) => {
    if (!there(v)) {
      absent += box(x + f * step, y, step, h);
      return;
    }
    const tall = Math.max(0.5, Math.abs(v * scale));
    const bar = box(x + (f + 0.08) * step, v < 0 ? zero : zero - tall, 0.84 * step, tall);
    if (f >= averaged) means += bar;
    else if (v < 0) down += bar;
    else up += bar;
  });
  out += line(absent, "absent") + line(up, "bar") + line(down, "bar") + line(means, "mark-average");
  if (columns > averaged) out += line(`M${round(x + averaged * step)} ${round(y)}v${round(h)}`, "gone");
  return { out: `<g>${out}</g>` + line(`M${round(x)} ${round(zero)}h${round(w)}`, "zero"), zero, scale };
}

// Of bars: 0 is in it
const rangeOf = ([low, high]) => [1.04 * Math.min(0, low), 1.04 * Math.max(0, high)];

// As the page's type
const zoom = () => parseFloat(getComputedStyle(document.documentElement).fontSize) / 14;

const room = (id) => Math.max(160, $(id).parentElement.clientWidth / zoom());

function put(id, width, height, content) {
  const svg = $(id);
  svg.setAttribute("viewBox", `0 0 ${round(width)} ${round(height)}`);
  svg.setAttribute("width", round(width * zoom()));
  svg.setAttribute("height", round(height * zoom()));
  svg.innerHTML = content;
}

// Lines of text below each other
function paragraphs(id, lines) {
  const shown = lines.filter((words) => words);
  $(id).replaceChildren(
    ...shown.map((words) => Object.assign(document.createElement("p"), { textContent: words })),
  );
}

function frame(x, y, w, h, name = "chosen") {
  return rect(x, y, w, h, at(name));
}
