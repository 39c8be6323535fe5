// What the user does, and what is drawn again then.

// Drawing -> what it was last drawn from
const drawn = new Map();

function redraw(name, make, from) {
  const key = JSON.stringify(from);
  if (drawn.get(name) === key) return false;
  drawn.set(name, key);
  make();
  return true;
}

function draw() {
  const s = state,
    quantity = [s.pass, s.quantity],
    at = [s.layer, s.head],
    filter = [s.kind, s.min, s.max];
  const list = [s.measure, s.list, s.sort, s.descending, s.list === "all" ? -1 : s.layer, filter];
  drawControls();
  drawTitle();
  drawPins();
  redraw("compare", drawCompare, [quantity, s.pins, s.pins.length < 2 ? at : 0, room("middle")]);
  redraw("map", () => drawMap("map", measure()), [s.pass, s.measure, filter, room("map")]);
  $("map2").parentElement.hidden = !besideMeasure();
  redraw("map2", () => drawMap("map2", besideMeasure()), [s.pass, s.beside, s.measure, filter, room("map2")]);
  redraw("map-note", drawMapNote, [s.pass, s.measure, s.beside, filter]);
  redraw("matrix", drawMatrix, [quantity, at, s.scale, room("matrix")]);
  redraw("profile", drawProfile, [quantity, at, s.scale, room("profile")]);
  redraw("video", drawVideo, [room("detail")]);
  redraw("onvideo", drawOnVideo, [quantity, at, s.patch, room("detail")]);
  redraw("keys", drawKeys, [quantity, at, s.scale, s.axis, room("keys")]);
  redraw("heads", drawHeads, [quantity, list, s.scale, s.language, room("heads")]);
  redraw("table", drawTable, [quantity, list]);
  markMap();
  markHeads();
  markTable();
  writeLink();
}

function drawControls() {
  const wanted = {
    layer: state.layer,
    head: state.head,
    pass: state.pass,
    quantity: state.quantity,
    scale: state.scale,
    measure: measure()?.name ?? "",
    beside: besideMeasure()?.name ?? "",
    list: state.list,
    axis: state.axis,
    kind: state.kind,
    theme: state.theme,
    language: state.language,
  };
  for (const [id, value] of Object.entries(wanted)) if ($(id).value !== String(value)) $(id).value = value;
  for (const id of ["min", "max"]) if (document.activeElement !== $(id)) $(id).value = state[id] ?? "";
  $("pass-label").textContent = pass().label;
  $("keys-box").hidden = !data.keys;
  $("kind-box").hidden = !pass().kinds;
  $("save-matrix").disabled = !pass().matrices[state.quantity];
  document.documentElement.lang = language();
  document.documentElement.dataset.theme = state.theme || (dark.matches ? "dark" : "light");
}

// -- choosing ----------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const wrap = (x, n) => (x + n) % n;
function choose(change) {
  Object.assign(state, change);
  draw();
}
const moveLayer = (d) => choose({ layer: wrap(state.layer + d, N) });
const moveHead = (d) => choose({ head: wrap(state.head + d, H) });
const movePass = (d) => choose({ pass: Math.min(data.passes.length - 1, Math.max(0, state.pass + d)) });

// Names: [value, words]
function fill(select, names) {
  select.replaceChildren(...names.map(([value, words]) => new Option(words, value)));
}

// ↑ and ↓ scroll, unless a drawing was clicked or reached by Tab. Fields of text keep all keys; sliders, selects
// and lists keep their arrows.
const KEYS = {
  ArrowLeft: () => moveHead(-1),
  ArrowRight: () => moveHead(1),
  k: () => moveLayer(-1),
  j: () => moveLayer(1),
  "[": () => movePass(-1),
  "]": () => movePass(1),
  p: togglePin,
};
const ON_DRAWINGS = { ArrowUp: () => moveLayer(-1), ArrowDown: () => moveLayer(1) };
const movePatch = (d) => choose({ patch: wrap(state.patch + d, maps.queries.length) });
const ON_VIDEO = { ArrowLeft: () => movePatch(-1), ArrowRight: () => movePatch(1) };

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.target.closest?.("input:not([type=range])")) return;
  if (event.key.startsWith("Arrow") && event.target.closest?.("select, input, .scroll")) return;
  const patch = event.target.closest?.("#onvideo") ? ON_VIDEO[event.key] : undefined;
  const move = patch ?? KEYS[event.key] ?? (event.target.closest?.("svg") ? ON_DRAWINGS[event.key] : undefined);
  if (!move) return;
  move();
  event.preventDefault();
});

// -- pointing ----------------------------------------------------------------------------------------

const inside = (i, n) => i >= 0 && i < n;
// What lies at a point of a drawing, or null
const CELL = {
  onvideo: onVideoCell,
  map(x, y) {
    const j = Math.floor((x - MAP.left) / MAP.w),
      i = Math.floor((y - MAP.top) / MAP.h);
    return measure() && inside(i, N) && inside(j, H) ? { layer: i, head: j } : null;
  },
  map2: (x, y) => CELL.map(x, y),
  matrix(x, y) {
    if (!MATRIX.values) return null;
    const s = MATRIX.size / C,
      k = Math.floor((x - MATRIX.left) / s),
      q = Math.floor((y - MATRIX.top) / s);
    return inside(k, C) && inside(q, F) ? { q, k } : null;
  },
  profile(x) {
    const k = Math.floor((x - PROFILE.left) / (PROFILE.w / C));
    return inside(k, C) ? { k } : null;
  },
  heads(x, y) {
    const g = HEADS,
      column = Math.floor((x - 4) / (g.w + g.gap)),
      row = Math.floor(y / (g.h + g.top + g.gap));
    const k = Math.floor((x - 4 - column * (g.w + g.gap)) / (g.w / C)),
      at = g.shown[row * g.columns + column];
    return inside(column, g.columns) && at
      ? { layer: at[0], head: at[1], k: inside(k, C) ? k : undefined }
      : null;
  },
};

function wordsFor(id, cell) {
  const i = cell.layer ?? state.layer,
    j = cell.head ?? state.head,
    m = id === "map2" ? besideMeasure() : measure();
  if (id === "onvideo") return onVideoWords(cell);
  if (id === "map" || id === "map2")
    return `${nameOf([i, j])}: ${m.title} ${show(measured(i, j, m))} ${there(measured(i, j, m)) ? m.unit : ""}`;
  if (id === "matrix") {
    const x = MATRIX.values[cell.q * C + cell.k],
      coded = pass().matrices[state.quantity];
    const half = coded.bytes === 1 && there(x) ? ` ± ${stepAt(coded, i, j, x).toPrecision(1)}` : "";
    const key = cell.k < F ? `key ${cell.k}` : keyName(cell.k);
    return `query ${cell.q}, ${key}: ${there(x) ? show(x) + half : "never attended"}`;
  }
  const value = cell.k === undefined ? "" : `${keyName(cell.k)}: ${show(profileOf(i, j)[cell.k])}`;
  return id === "profile" ? value : `${nameOf([i, j])}${value && `, ${value}`}`;
}

function showTip(id, cell, event) {
  const tip = $("tip"),
    pictures = data.thumbnails.length ? [cell.q, cell.k].filter((f) => f < F) : [];
  tip.textContent = wordsFor(id, cell);
  if (pictures.length) tip.append(document.createElement("br"));
  for (const f of pictures)
    tip.append(Object.assign(new Image(), { src: data.thumbnails[f], alt: `frame ${f}` }));
  tip.style.display = "block";
  const below = event.clientY + 16 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 10}px`;
}

for (const id of Object.keys(CELL)) {
  const svg = $(id);
  const cellAt = (event) => {
    // the drawing is in pixels, whatever its size in the window
    const box = svg.getBoundingClientRect(),
      view = svg.viewBox.baseVal;
    return CELL[id](
      ((event.clientX - box.left) / box.width) * view.width,
      ((event.clientY - box.top) / box.height) * view.height,
    );
  };
  const point = (event) => {
    const cell = cellAt(event),
      mark = id === "matrix" && $("matrix-cell"),
      s = MATRIX.size / C;
    if (cell) showTip(id, cell, event);
    else $("tip").style.display = "none";
    if (mark) mark.innerHTML = cell ? frame(MATRIX.left + cell.k * s, MATRIX.top + cell.q * s, s, s) : "";
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => {
    // a finger leaves as soon as it is lifted: its tip stays until the next touch
    if (event.pointerType !== "touch") $("tip").style.display = "none";
  });
  svg.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell?.layer !== undefined) choose({ layer: cell.layer, head: cell.head });
    if (cell?.patch !== undefined) choose({ patch: cell.patch });
  });
}

$("table").addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-head]"),
    column = event.target.closest("[data-sort]")?.dataset.sort;
  if (row) choose({ layer: Number(row.dataset.layer), head: Number(row.dataset.head) });
  if (!column) return;
  // Down, up, then as they are
  const again = state.sort === column;
  choose(again && !state.descending ? { sort: "", descending: true } : { sort: column, descending: !again });
  $("table").querySelector(`[data-sort="${column}"]`)?.focus();
});

// -- start -------------------------------------------------------------------------------------------

addEventListener("pointerdown", (event) => {
  if (!event.target.closest("svg")) $("tip").style.display = "none";
});
$("what").textContent = data.title;
paragraphs("source", [data.subtitle, data.other ? `Compared with B: ${data.other.source}` : ""]);
paragraphs("notes", data.notes);
document.title = `${data.title}: attention by layer and head`;
fill(
  $("layer"),
  data.layers.map((layer, i) => [i, layer]),
);
fill(
  $("head"),
  Array.from({ length: H }, (_, j) => [j, j]),
);
for (const id of ["measure", "beside"])
  fill(
    $(id),
    data.passes[0].measures.map((m) => [m.name, m.title]),
  );
fill(
  $("quantity"),
  quantities.map((name) => [name, data.quantities[name].label]),
);
fill($("kind"), [
  ["", "all"],
  ...[...new Set(data.passes.flatMap((one) => (one.kinds ?? []).flat()))].sort().map((kind) => [kind, kind]),
]);
$("pass").max = data.passes.length - 1;
$("pass-box").hidden = $("pass-keys").hidden = data.passes.length < 2;
$("quantity-box").hidden = quantities.length < 2;
for (const [name, move] of [
  ["layer", moveLayer],
  ["head", moveHead],
]) {
  $(`${name}-down`).addEventListener("click", () => move(-1));
  $(`${name}-up`).addEventListener("click", () => move(1));
}
for (const name of ["layer", "head", "pass"])
  $(name).addEventListener("input", (event) => choose({ [name]: Number(event.target.value) }));
for (const name of ["quantity", "measure", "beside", "scale", "axis", "list", "kind", "theme", "language"]) {
  $(name).addEventListener("change", (event) => choose({ [name]: event.target.value }));
}
for (const name of ["min", "max"])
  $(name).addEventListener("input", (event) => choose({ [name]: number(event.target.value) }));
$("reset").addEventListener("click", () =>
  choose({ kind: "", min: null, max: null, sort: "", descending: true, list: "layer" }),
);
$("pin").addEventListener("click", togglePin);
dark.addEventListener("change", draw);
addEventListener("hashchange", () => {
  readLink();
  draw();
});
new ResizeObserver(draw).observe(document.querySelector("main"));
readLink();
draw();
