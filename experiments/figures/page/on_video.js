// What a patch of a query frame sees, over the pictures of the video: a click on a patch chooses it.

const FRAMES = { top: 34, gap: 6, label: 15, width: 84, query: 210, alpha: 0.65, least: 0.2, shown: [] };

// The query nearest to the middle of the first frame that has any: a corner shows background
function middleQuery() {
  const distances = maps.queries.map(([frame, row, column]) =>
    frame === maps.queries[0][0] && row >= 0
      ? Math.hypot(row - (maps.rows - 1) / 2, column - (maps.columns - 1) / 2)
      : Infinity,
  );
  return distances.indexOf(Math.min(...distances));
}

if (maps) {
  START.patch = middleQuery();
  state.patch = START.patch;
  LINK.patch = [upTo(maps.queries.length), String];
}

// Places of the shown layer, head and pass in the maps, or null
function mapsAt() {
  if (!hasMaps(state.layer, state.head, state.pass)) return null;
  return [
    maps.passes.indexOf(pass().label),
    maps.layers.indexOf(data.layers[state.layer]),
    maps.heads.indexOf(state.head),
  ];
}

// Which layers, heads and passes the maps cover
function coveredByMaps() {
  const every = data.passes.every((one) => maps.passes.includes(one.label));
  return `Maps cover ${maps.covers}; ${every ? "every pass" : maps.passes.join(", ")}.`;
}

// Of one query -> F * rows * columns numbers, null where nothing is seen
function seenBy(query) {
  const [p, i, j] = mapsAt(),
    coded = maps.coded,
    codes = codesOf(coded),
    n = F * maps.rows * maps.columns;
  const row = ((p * maps.layers.length + i) * maps.heads.length + j) * maps.queries.length + query;
  const low = coded.low[p][i][j][query],
    span = coded.high[p][i][j][query] - low;
  return Array.from({ length: n }, (_, k) => {
    const share = codes[row * n + k] / 254;
    return share > 1 ? null : low + span * share * share;
  });
}

const rgbOf = (shade) => shade.match(/\d+/g).map(Number);
const cellOf = (values, f, r, c) => values[(f * maps.rows + r) * maps.columns + c];

// A picture of one frame's values, bilinear between the centres of patches, as a data URI; null for none
function heat(values, f, top) {
  const large = Math.max(1, Math.ceil(96 / maps.columns)),
    w = maps.columns * large,
    h = maps.rows * large;
  const canvas = Object.assign(document.createElement("canvas"), { width: w, height: h }),
    context = canvas.getContext("2d"),
    image = context.createImageData(w, h);
  const between = (n, cells, k) => {
    const x = Math.min(cells - 1, Math.max(0, (k + 0.5) / n - 0.5)),
      a = Math.floor(x);
    return [a, Math.min(cells - 1, a + 1), x - a];
  };
  for (let y = 0; y < h; y++) {
    const [r0, r1, v] = between(large, maps.rows, y);
    for (let x = 0; x < w; x++) {
      const [c0, c1, u] = between(large, maps.columns, x);
      const corners = [
        [r0, c0, (1 - v) * (1 - u)],
        [r0, c1, (1 - v) * u],
        [r1, c0, v * (1 - u)],
        [r1, c1, v * u],
      ].map(([r, c, weight]) => [cellOf(values, f, r, c), weight]);
      const some = corners.filter(([value]) => value !== null),
        weight = sum(some.map(([, share]) => share));
      if (!weight) continue;
      const value = sum(some.map(([number, share]) => number * share)) / weight,
        share = Math.sqrt(Math.min(1, Math.max(0, value / top)));
      const color = rgbOf(VIRIDIS[Math.round(share * (SHADES - 1))]),
        at = 4 * (y * w + x);
      image.data.set([...color, 255 * FRAMES.alpha * (FRAMES.least + (1 - FRAMES.least) * share) * weight], at);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

const stretched = (href, x, y, w, h) =>
  `<image href="${escaped(href)}" x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" ` +
  `preserveAspectRatio="none"/>`;

// One frame at a place: picture, map, hatching of noise, the query
function mapFrame(values, f, x, y, w, h, top, noise) {
  const [frameOf, r, c] = maps.queries[state.patch],
    [rows, columns] = maps.grid;
  let out = data.thumbnails[f] ? stretched(data.thumbnails[f], x, y, w, h) : rect(x, y, w, h, at("absent"));
  const seen = values.slice(f * maps.rows * maps.columns, (f + 1) * maps.rows * maps.columns).some(there);
  if (seen) out += stretched(heat(values, f, top), x, y, w, h);
  else out += rect(x, y, w, h, at("unseen"));
  if (noise.includes(f)) {
    let lines = "";
    for (let k = 8; k < w + h; k += 9)
      lines += `M${round(x + Math.max(0, k - h))} ${round(y + Math.min(k, h))}L${round(x + Math.min(k, w))} ${round(y + Math.max(0, k - w))}`;
    out += line(lines, "hatch");
  }
  if (f === frameOf) {
    const whole = r < 0,
      [wide, high] = whole ? [w, h] : [w / columns, h / rows];
    out += frame(x + (whole ? 0 : c * wide), y + (whole ? 0 : r * high), wide, high, "query");
  }
  FRAMES.shown.push({ f, x, y, w, h });
  return out;
}

function drawOnVideo() {
  $("onvideo-box").hidden = !maps;
  if (!maps) return;
  FRAMES.shown = [];
  const here = mapsAt();
  $("onvideo").parentElement.hidden = !here;
  if (!here) {
    $("onvideo").replaceChildren();
    paragraphs("onvideo-note", [`No maps of this head in this pass. ${coveredByMaps()}`]);
    return;
  }
  const g = FRAMES,
    width = room("onvideo"),
    values = seenBy(state.patch),
    noise = maps.noise[here[0]][state.patch],
    [own, row, column] = maps.queries[state.patch];
  // the colours end at the largest value of earlier blocks: a query's own token would leave them in one colour
  const earlier = values.slice(0, maps.own[state.patch] * maps.rows * maps.columns).filter(there);
  const top = Math.max(...(earlier.length ? earlier : values.filter(there)), 1e-9),
    shape = maps.grid[0] / maps.grid[1];
  const queryFrame = own < 0 ? F - 1 : own,
    narrow = width < 480, // the frames lie below the query
    side = Math.min(g.query, narrow ? width - 8 : width / 3),
    most = Array.from({ length: F }, (_, f) => f);
  let out = mapFrame(values, queryFrame, 4, g.top, side, side * shape, top, noise);
  const patches = maps.queries.filter(([f, r]) => f === queryFrame && r >= 0);
  for (const [, r, c] of patches)
    out += `<circle cx="${round(4 + ((c + 0.5) / maps.grid[1]) * side)}" cy="${round(g.top + ((r + 0.5) / maps.grid[0]) * side * shape)}" r="2.5" class="spot"/>`;
  const who = row < 0 ? (own < 0 ? "mean over the block" : `frame ${own}`) : `row ${row}, column ${column} of frame ${own}`;
  out += text(4, g.top - 8, `query: ${who}`, "strong");
  const left = narrow ? 4 : side + 22,
    below = g.top + side * shape + 76,
    start = narrow ? below : g.top - 16,
    columns = Math.max(1, Math.round((width - left) / (g.width + g.gap))),
    wide = (width - left) / columns - g.gap,
    high = wide * shape;
  most.forEach((f, k) => {
    const x = left + (k % columns) * (wide + g.gap),
      y = start + Math.floor(k / columns) * (high + g.label + g.gap);
    out += text(x + wide / 2, y + 11, f === own ? `${f} (query)` : f, "middle small");
    out += mapFrame(values, f, x, y + g.label, wide, high, top, noise);
  });
  const scale = { low: 0, high: top, shades: VIRIDIS.map((_, s) => VIRIDIS[Math.round(Math.sqrt(s / (SHADES - 1)) * (SHADES - 1))]) };
  const bottom = Math.max(below, start + 16 + Math.ceil(F / columns) * (high + g.label + g.gap));
  out += colorBar(4, g.top + side * shape + 26, side, scale, maps.unit);
  put("onvideo", width, bottom, out);
  const pooled = maps.rows < maps.grid[0] || maps.columns < maps.grid[1] ? " Patches are pooled to fit in the page." : "";
  const always = state.quantity === "mass" ? "" : ", whatever Show says";
  paragraphs("onvideo-note", [
    "Click a patch of a frame that has dots to ask what it sees, or press ← → here.",
    `The colours show mass per key token${always}; 1 is even attention. They end at the largest value of earlier blocks.` +
      ` Pale: not seen.${noise.length ? " Hatched: noise in this pass." : ""}${pooled}`,
    coveredByMaps(),
  ]);
}

// What lies at a point of the drawing: a frame, its patch, and the captured query nearest to it
function onVideoCell(x, y) {
  if (!maps || !mapsAt()) return null;
  const hit = FRAMES.shown.find((one) => x >= one.x && x < one.x + one.w && y >= one.y && y < one.y + one.h);
  if (!hit) return null;
  const v = (y - hit.y) / hit.h,
    u = (x - hit.x) / hit.w,
    [rows, columns] = maps.grid;
  const distance = ([f, r, c]) =>
    f !== hit.f ? Infinity : r < 0 ? 9 : Math.hypot((r + 0.5) / rows - v, (c + 0.5) / columns - u);
  const distances = maps.queries.map(distance),
    best = Math.min(...distances);
  const value = cellOf(seenBy(state.patch), hit.f, Math.floor(v * maps.rows), Math.floor(u * maps.columns));
  return {
    frame: hit.f,
    row: Math.floor(v * rows),
    column: Math.floor(u * columns),
    value,
    patch: best < Infinity ? distances.indexOf(best) : undefined,
  };
}

const onVideoWords = ({ frame: f, row, column, value }) =>
  `frame ${f}, row ${row}, column ${column}: ${there(value) ? `${show(value, 2)} × even` : "not seen"}`;
