// One head: its frame matrix, its profile, and the video it looked at.

const SPANNED = { head: "this head alone", layer: "all heads of this layer", all: "all heads" };

const MATRIX = { left: 38, top: 6, most: 620 };

const ABSENT_MATRIX = () =>
  pass().left_out ? "left out of this page for its size" : "this cache holds no whole frame matrix";

const KEYS_AXIS = "Key frame (latent)" + (C > F ? ", μ: averages of gone frames" : "");

// Above the averages in C columns of so many pixels
const averageStrip = (x, y, width) =>
  C > F ? rect(x + (F * width) / C, y - 5, ((C - F) * width) / C, 4, at("mark-average")) : "";

// Cells and block edges; averages of gone frames behind a line, with a strip above them
function matrixDrawing(values, x, y, size, scale) {
  const s = size / C;
  let edges = "";
  if (F <= 40)
    for (const e of blockEdges) {
      edges += `M${round(x + e * s)} ${y}v${round(F * s)}M${x} ${round(y + e * s)}h${round(F * s)}`;
    }
  const gone = C > F ? line(`M${round(x + F * s)} ${y}v${round(F * s)}`, "gone") + averageStrip(x, y, size) : "";
  return grid(values, C, x, y, s, s, scale) + line(edges, "edge") + gone;
}

// Of C columns in so many pixels: frames, and each average where there is room, else one μ for all
function keyLabels(x, y, width, many) {
  const s = width / C,
    each = s > 16;
  let out = "";
  for (const k of ticks(F, many))
    if (each || C === F || (F - k) * s > 10) out += text(x + (k + 0.5) * s, y, k, "middle small");
  const names = each ? data.averages : C > F ? ["μ"] : [];
  names.forEach((name, k) => {
    out += text(x + (each ? F + k + 0.5 : (F + C) / 2) * s, y, name, "middle small strong");
  });
  return out;
}

// Below, and at the left where rows
function frameLabels(x, y, size, many, rows) {
  const s = size / C;
  let out = keyLabels(x, y + F * s + 12, size, many);
  for (const k of ticks(F, many)) {
    if (rows) out += text(x - 5, y + (k + 0.5) * s + 3.5, k, "end small");
  }
  return out;
}

function drawMatrix() {
  const g = MATRIX,
    values = (g.values = matrixOf(state.layer, state.head)),
    width = room("matrix");
  if (!values) {
    put("matrix", width, 60, text(width / 2, 34, ABSENT_MATRIX(), "middle"));
    $("matrix-note").textContent = "";
    return;
  }
  const size = (g.size = Math.min(g.most, width - g.left - 8)),
    high = (F * size) / C,
    bottom = g.top + high;
  const scale = matrixScale(...scaledWith(pass().matrices[state.quantity], state.layer, state.head));
  let out =
    matrixDrawing(values, g.left, g.top, size, scale) +
    frameLabels(g.left, g.top, size, size < 260 ? 8 : 14, true);
  out +=
    text(g.left + size / 2, bottom + 27, KEYS_AXIS, "middle") +
    upright(11, g.top + high / 2, "Query frame (latent)");
  out += colorBar(g.left, bottom + 48, size, scale, about().label);
  put("matrix", g.left + size + 8, bottom + 80, `${out}<g id="matrix-cell"></g>`);
  $("matrix-note").textContent =
    (values.includes(null) ? "Grey was never attended. " : "") +
    (C > F ? "Behind the line: averages of evicted frames. " : "") +
    `The colours span ${SPANNED[state.scale]}.`;
}

const PROFILE = { left: 52, top: 8 };

function drawProfile() {
  const g = PROFILE,
    width = Math.min(room("profile"), MATRIX.most + 60),
    w = (g.w = width - g.left - 8);
  const h = (g.h = Math.max(150, Math.min(0.85 * w, 420))),
    step = w / C;
  const profile = profileOf(state.layer, state.head),
    range = rangeOf(scaledWith(shown().profiles, state.layer, state.head));
  const drawn = bars(profile, g.left, g.top, w, h, range),
    [marks, digits] = levels(...range);
  let lines = "",
    out = "";
  for (const v of marks) {
    const y = drawn.zero - v * drawn.scale;
    lines += `M${g.left} ${round(y)}h${round(w)}`;
    out += text(g.left - 5, y + 3.5, show(v, digits), "end small");
  }
  out += keyLabels(g.left, g.top + h + 13, w, w < 260 ? 8 : 14);
  out += averageStrip(g.left, g.top, w);
  out +=
    text(g.left + w / 2, g.top + h + 28, KEYS_AXIS, "middle") +
    upright(11, g.top + h / 2, about().label);
  put("profile", width, g.top + h + 34, line(lines, "grid") + drawn.out + out);
  const q = data.query_frames,
    noise = pass().noise;
  $("profile-note").textContent =
    `Mean over query frames ${q[0]}–${q[q.length - 1]}.` +
    (noise.length === 0
      ? ""
      : noise.length < F
        ? " Shaded: the queries' own block, noise in this pass."
        : " Every frame is noise in this pass.");
}

// As many pictures as fit, the query frames' among them
function drawVideo() {
  const pictures = data.thumbnails;
  $("video").parentElement.hidden = !pictures.length;
  if (!pictures.length) return;
  const width = room("video"),
    most = Math.max(2, Math.min(F, Math.floor(width / 62))),
    w = width / most;
  let out = "";
  for (let k = 0; k < most; k++) {
    const f = most === 1 ? 0 : Math.round((k * (F - 1)) / (most - 1)),
      query = data.query_frames.includes(f);
    const x = round(k * w + 1);
    out += `<image href="${escaped(pictures[f])}" x="${x}" y="0" width="${round(w - 2)}" height="40"/>`;
    out += text((k + 0.5) * w, 53, query ? `${f} (query)` : f, `middle small${query ? " strong" : ""}`);
  }
  put("video", width, 58, out);
}

function drawTitle() {
  const i = state.layer,
    j = state.head,
    m = measure(),
    kinds = pass().kinds,
    x = measured(i, j),
    unit = m?.name === "log_mass_effect" ? ` (${show(Math.exp(x), 2)} times the mass)` : ` ${m?.unit}`;
  $("detail-title").textContent = say(
    `第 ${data.layers[i]} 层，头 ${j}`,
    `Layer ${data.layers[i]}, head ${j}`,
  );
  const kind = kinds?.[i][j],
    lines = [`${capital(pass().label)}${m ? `; ${m.title} ${show(x, 2)}${there(x) ? unit : ""}` : ""}.`];
  if (kind) lines.push(`Kind ${kind}: ${data.kinds[kind]}.`);
  const isOpening = ["layer", "head", "pass"].every((name) => state[name] === START[name]);
  if (isOpening && opening) {
    const among = mapped.length ? "heads with maps on the video" : "all heads";
    lines.push(`The page opens at this head: of ${among} it has the largest ${opening.title}.`);
  }
  const clean = data.passes.some((one) => one.label.startsWith("clean pass"));
  lines.push(
    "Pass: one forward over a block of frames; 0 is the first denoising step" +
      `${clean ? ", the clean pass (t = 0) writes the cache" : ""}.`,
  );
  paragraphs("detail-line", lines);
}
