// Many heads at once: the map of all layers and heads, the profiles of the listed heads, and their table.

const MAP = { left: 38, top: 6 };

// A map of one measure: "map" and, beside it, "map2"
function drawMap(id, m) {
  if (!m) {
    put(id, 10, 10, "");
    return;
  }
  const width = Math.min(room(id), 620),
    w = (MAP.w = (width - MAP.left - 4) / H);
  const h = (MAP.h = Math.max(10, Math.min(20, 1.1 * w, 560 / N))),
    bottom = MAP.top + N * h,
    across = w * H;
  const scale = mapScale(m),
    kept = [],
    rest = [];
  m.values.forEach((row, i) =>
    row.forEach((x, j) => {
      kept.push(isKept(i, j) ? (x ?? null) : undefined);
      rest.push(isKept(i, j) ? undefined : (x ?? null));
    }),
  );
  let out =
    grid(kept, H, MAP.left, MAP.top, w, h, scale) + grid(rest, H, MAP.left, MAP.top, w, h, scale, "dim");
  for (const i of ticks(N, 30))
    out += text(MAP.left - 5, MAP.top + (i + 0.5) * h + 3.5, data.layers[i], "end small");
  // a number of two digits takes 15 units
  for (const j of ticks(H, Math.min(20, across / 15)))
    out += text(MAP.left + (j + 0.5) * w, bottom + 12, j, "middle small");
  out +=
    text(MAP.left + across / 2, bottom + 27, "Head", "middle") + upright(11, MAP.top + (N * h) / 2, "Layer");
  // title and unit in one line where it fits, at 5.4 units a letter
  const label = `${m.title}, ${m.unit}`,
    isShort = 5.4 * label.length < across,
    below = isShort ? 48 : 62;
  if (!isShort) out += text(width / 2, bottom + 47, m.title, "middle");
  out += colorBar(MAP.left, bottom + below, across, scale, isShort ? label : m.unit);
  put(id, width, bottom + below + 32, `${out}<g id="${id}-marks"></g>`);
}

// In words; of a difference, also between what
function meaningOf(m) {
  const name = m?.name.replace(/_difference$/, ""),
    meaning = data.meanings[name];
  if (!meaning) return "";
  return `${capital(m.title)}: ${meaning}${name === m.name ? "" : "; here A, this cache, less B, the second cache"}.`;
}

// What both maps show, and how to read their colours
function drawMapNote() {
  const measures = [...new Set([measure(), besideMeasure()].filter((m) => m))];
  const lines = measures.map(meaningOf);
  lines.push(
    `One cell per head, ${pass().label}; a click chooses it. The colours span the 2nd to the 98th percentile, or 0 to 1 for shares.` +
      (isFiltered() ? " Heads that the list leaves out are dimmed." : ""),
  );
  paragraphs("map-note", lines);
}

// The chosen head and the pinned ones
function markMap() {
  let out = "";
  const box = (i, j) => [MAP.left + j * MAP.w, MAP.top + i * MAP.h, MAP.w, MAP.h];
  state.pins.forEach(([i, j], k) => {
    const [x, y, w, h] = box(i, j);
    out +=
      frame(x, y, w, h, "under") +
      frame(x, y, w, h, "chosen") +
      text(x + w / 2, y + h / 2 + 4, "AB"[k], "middle strong letter");
  });
  out += frame(...box(state.layer, state.head), "under") + frame(...box(state.layer, state.head), "chosen");
  for (const id of ["map-marks", "map2-marks"]) if ($(id)) $(id).innerHTML = out;
}

const HEADS = { w: 112, h: 62, top: 16, gap: 10, most: 24 };

function drawHeads() {
  const g = HEADS,
    all = listed(),
    width = room("heads");
  g.shown = all.slice(0, g.most);
  g.columns = Math.max(2, Math.floor(width / 118));
  g.w = (width - 8) / g.columns - g.gap;
  let out = "";
  g.shown.forEach(([i, j], k) => {
    const x = 4 + (k % g.columns) * (g.w + g.gap),
      y = Math.floor(k / g.columns) * (g.h + g.top + g.gap);
    const range = rangeOf(scaledWith(shown().profiles, i, j)),
      delta = show(shown().statistics.delta[i][j], state.quantity === "mass" ? 3 : 2);
    out += `<g id="head-${i}-${j}">${rect(x - 4, y + 1, g.w + 8, g.h + g.top + 4, 'rx="4" fill="none"')}</g>`;
    out += text(x + 1, y + 12, `${state.list === "all" ? `L${data.layers[i]} ` : ""}H${j}  Δ ${delta}`);
    out += bars(profileOf(i, j), x, y + g.top, g.w, g.h, range).out;
  });
  put("heads", width, Math.max(1, Math.ceil(g.shown.length / g.columns)) * (g.h + g.top + g.gap), out);
  $("heads-title").textContent =
    state.list === "all"
      ? say("列出的头", "Listed heads of all layers")
      : say(`第 ${data.layers[state.layer]} 层的头`, `Heads of layer ${data.layers[state.layer]}`);
  $("heads-note").textContent =
    (all.length > g.most ? `The first ${g.most} of ${all.length} listed heads, each ` : "Each head ") +
    `${SCALED[state.scale]}. Δ = first − middle in ${about().unit}; ` +
    "middle is the mean of all frames between the first and the last.";
}

function markHeads() {
  for (const old of document.querySelectorAll("#heads .around")) {
    old.removeAttribute("class");
  }
  $(`head-${state.layer}-${state.head}`)?.firstElementChild.setAttribute("class", "around");
}

// Kinds that any head of this pass has
const kindsShown = () => (pass().kinds ? [...new Set(pass().kinds.flat())].filter((kind) => kind).sort() : []);

// A ratio means something for mass alone: logits have no natural 0. Δ is the measure first − middle of logits.
const SHOWN_WHERE = {
  ratio: () => state.quantity === "mass",
  kind: () => pass().kinds !== null,
  measure: () => measure() && !(state.quantity === "mean_logit" && measure().name === "first_minus_middle"),
};
const columnsShown = () => Object.keys(COLUMNS).filter((name) => !SHOWN_WHERE[name] || SHOWN_WHERE[name]());

function cellText(name, i, j) {
  const x = COLUMNS[name][1](i, j);
  if (name === "kind") return x;
  return ["layer", "head", "max_frame"].includes(name)
    ? there(x)
      ? String(x)
      : "N/A"
    : show(x, name === "ratio" ? 2 : 3);
}

function drawTable() {
  const names = columnsShown(),
    m = measure(),
    all = listed();
  const heading = (name) => (name === "measure" ? `${m.title}, ${m.unit}` : COLUMNS[name][0]);
  const sorted = (name) =>
    state.sort === name ? `aria-sort="${state.descending ? "descending" : "ascending"}"` : "";
  const arrow = (name) => (state.sort === name ? (state.descending ? " ↓" : " ↑") : "");
  const button = (name) => `<button data-sort="${name}">${escaped(heading(name) + arrow(name))}</button>`;
  const head = names.map((name) => `<th scope="col" ${sorted(name)}>${button(name)}</th>`);
  const rows = all.map(
    ([i, j]) =>
      `<tr data-layer="${i}" data-head="${j}">` +
      `${names.map((name) => `<td>${escaped(cellText(name, i, j))}</td>`).join("")}</tr>`,
  );
  $("table").innerHTML = `<thead><tr>${head.join("")}</tr></thead><tbody>${rows.join("")}</tbody>`;
  const of = state.list === "all" ? N * H : H,
    q = data.query_frames;
  $("table-note").textContent =
    `${all.length} of ${of} heads. First, middle, last and Δ: ${about().name} (${about().unit}), ` +
    `query frames ${q[0]}–${q[q.length - 1]}, ${pass().label}. Middle: mean of all frames between the first and ` +
    `the last. Δ = first − middle; max at: the key frame of the largest value.` +
    (names.includes("ratio") ? " First / middle: how many times the mass of the middle." : "");
  paragraphs("kind-note", kindsShown().map((kind) => `${kind}: ${data.kinds[kind]}.`));
  $("filter-name").textContent = m ? m.title : "";
}

function markTable() {
  $("table").querySelector("tr.chosen")?.classList.remove("chosen");
  $("table")
    .querySelector(`tr[data-layer="${state.layer}"][data-head="${state.head}"]`)
    ?.classList.add("chosen");
}
