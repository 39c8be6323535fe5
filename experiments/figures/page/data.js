"use strict";
// What the page holds, what of it is shown (state), and the link that names the state.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const F = data.num_frames,
  H = data.num_heads,
  N = data.layers.length,
  // columns of keys: frames, then averages of evicted frames
  C = F + data.averages.length;
const there = (x) => x !== null && x !== undefined && !Number.isNaN(x);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const blockEdges = data.blocks.slice(1).map((_, k) => sum(data.blocks.slice(0, k + 1)));

// -- coded arrays: low + (high - low) (code / top) ^ power, where top + 1 is absent ------------------

const decodedCodes = new Map();

function codesOf(coded) {
  if (!decodedCodes.has(coded)) {
    const bytes = Uint8Array.from(atob(coded.codes), (c) => c.charCodeAt(0));
    decodedCodes.set(coded, coded.bytes === 2 ? new Uint16Array(bytes.buffer) : bytes);
  }
  return decodedCodes.get(coded);
}

// The numbers of one head, null where absent
function rowOf(coded, layer, head) {
  const codes = codesOf(coded),
    n = codes.length / (N * H),
    start = (layer * H + head) * n;
  const low = coded.low[layer][head],
    span = coded.high[layer][head] - low,
    top = 256 ** coded.bytes - 2;
  const out = new Array(n);
  for (let i = 0; i < n; i++) {
    const share = codes[start + i] / top;
    out[i] = share > 1 ? null : low + span * (coded.power === 2 ? share * share : share);
  }
  return out;
}

// The distance of the two codes around a value
function stepAt(coded, layer, head, x) {
  const low = coded.low[layer][head],
    span = coded.high[layer][head] - low,
    top = 256 ** coded.bytes - 2;
  const share = span > 0 ? Math.max(1 / top, (x - low) / span) : 0;
  return coded.power === 2 ? (2 * span * Math.sqrt(share)) / top : span / top;
}

// -- what is shown -----------------------------------------------------------------------------------

const quantities = Object.keys(data.quantities);
// The wanted measure, or the first there is
const nameIn = (measures, wanted) => (measures.find((m) => m.name === wanted) ?? measures[0])?.name ?? "";
const START = {
  layer: 0,
  head: 0,
  pass: 0,
  quantity: quantities[0],
  measure: nameIn(data.passes[0].measures, "first_frame_effect"),
  beside: "",
  scale: "head",
  axis: "frame",
  list: "layer",
  kind: "",
  min: null,
  max: null,
  sort: "",
  descending: true,
  pins: [],
  theme: "",
  language: "",
};
// Beside it another measure, where there is one
START.beside = nameIn(
  data.passes[0].measures.filter((m) => m.name !== START.measure),
  "wave_amplitude",
);
// Of attention on the video, or null; then the page opens where there is some
const maps = data.maps;
if (maps) START.pass = Math.max(0, data.passes.findIndex((one) => maps.passes.includes(one.label)));
const hasMaps = (i, j, p) =>
  maps?.passes.includes(data.passes[p].label) && maps.layers.includes(data.layers[i]) && maps.heads.includes(j);
// A head worth seeing: where the first measure is largest, of the heads with maps if there are any
const opening = data.passes[START.pass].measures.find((m) => m.name === START.measure);
const opened = opening?.values.flat() ?? [];
const allHeads = Array.from({ length: N * H }, (_, n) => n);
const mapped = allHeads.filter((n) => hasMaps(Math.floor(n / H), n % H, START.pass));
const largest = (mapped.length ? mapped : allHeads).reduce((best, n) =>
  there(opened[n]) && !(there(opened[best]) && opened[best] >= opened[n]) ? n : best,
);
[START.layer, START.head] = [Math.floor(largest / H), largest % H];
const state = { ...START };

// The headings' language: the chosen one, else the browser's
const language = () => state.language || (navigator.language.startsWith("zh") ? "zh" : "en");
const say = (zh, en) => (language() === "zh" ? zh : en);
const pass = () => data.passes[state.pass];
const shown = () => pass().quantities[state.quantity];
const about = () => data.quantities[state.quantity];
const measure = () => pass().measures.find((m) => m.name === state.measure) ?? pass().measures[0];
// Undefined where there is one measure alone
function besideMeasure() {
  const measures = pass().measures;
  if (measures.length < 2) return undefined;
  return measures.find((m) => m.name === state.beside) ?? measures.find((m) => m !== measure());
}
const measured = (i, j, m = measure()) => m?.values[i][j];
// Of the second cache, where there is one
const otherPass = () => data.other && data.other.passes[Math.min(state.pass, data.other.passes.length - 1)];
// What a column of keys is, in words
const keyName = (k) => (k < F ? `key frame ${k}` : `${data.averages[k - F]}, an average of gone frames`);
const profileOf = (i, j, of = pass()) => rowOf(of.quantities[state.quantity].profiles, i, j);

// -> F * C numbers by rows, null where nothing was attended; or null
function matrixOf(i, j, of = pass()) {
  const coded = of.matrices[state.quantity];
  if (!coded) return null;
  const out = new Array(F * C).fill(null),
    row = rowOf(coded, i, j);
  coded.cells.forEach((cell, k) => {
    out[cell] = row[k];
  });
  return out;
}

// -- lists of heads ----------------------------------------------------------------------------------

// Does a head pass the filters?
function isKept(i, j) {
  const x = measured(i, j);
  return (
    (state.kind === "" || !pass().kinds || pass().kinds[i][j] === state.kind) &&
    (state.min === null || (there(x) && x >= state.min)) &&
    (state.max === null || (there(x) && x <= state.max))
  );
}

const isFiltered = () => state.kind !== "" || state.min !== null || state.max !== null;

// Of the table: heading -> value of a head
const COLUMNS = {
  layer: ["layer", (i, j) => data.layers[i]],
  head: ["head", (i, j) => j],
  first: ["first", (i, j) => shown().statistics.first[i][j]],
  middle: ["middle", (i, j) => shown().statistics.middle[i][j]],
  last: ["last", (i, j) => shown().statistics.last[i][j]],
  delta: ["Δ", (i, j) => shown().statistics.delta[i][j]],
  ratio: ["first / middle", (i, j) => shown().statistics.ratio[i][j]],
  max_frame: [
    "max at",
    (i, j) => (shown().statistics.max_frame[i][j] < 0 ? null : shown().statistics.max_frame[i][j]),
  ],
  kind: ["kind", (i, j) => pass().kinds[i][j]],
  measure: ["", (i, j) => measured(i, j)],
};

// -> [layer, head] of the heads that the list shows, in its order
function listed() {
  const found = [];
  for (let i = 0; i < N; i++) {
    if (state.list !== "all" && i !== state.layer) continue;
    for (let j = 0; j < H; j++) if (isKept(i, j)) found.push([i, j]);
  }
  if (!columnsShown().includes(state.sort)) return found;
  const of = COLUMNS[state.sort][1],
    sign = state.descending ? -1 : 1;
  const keyed = found.map((at) => [of(...at), at]);
  keyed.sort(([a], [b]) =>
    there(a) && there(b) ? sign * (a < b ? -1 : a > b ? 1 : 0) : there(b) - there(a),
  );
  return keyed.map(([, at]) => at);
}

// -- the link ----------------------------------------------------------------------------------------

const number = (word) => (word !== "" && Number.isFinite(Number(word)) ? Number(word) : null);
const oneOf = (names, other) => (word) => (names.includes(word) ? word : other);
const layerAt = (word) => Math.max(0, word === "" ? 0 : data.layers.indexOf(Number(word)));
const upTo = (n) => (word) =>
  Number.isInteger(Number(word)) && Number(word) >= 0 && Number(word) < n ? Number(word) : 0;

// "1.1_5.10" -> indices; what is not there is left out
function pinsOf(word) {
  const pins = word.split("_").map((pin) => pin.split(".").map(Number));
  return pins
    .map(([layer, head]) => [data.layers.indexOf(layer), head])
    .filter(([i, j]) => i >= 0 && Number.isInteger(j) && j >= 0 && j < H)
    .slice(0, 2);
}

// Each part of the state: from a word of the link, and to one
const LINK = {
  layer: [layerAt, (i) => data.layers[i]],
  head: [upTo(H), String],
  pass: [upTo(data.passes.length), String],
  quantity: [oneOf(quantities, START.quantity), String],
  measure: [
    oneOf(
      data.passes[0].measures.map((m) => m.name),
      START.measure,
    ),
    String,
  ],
  beside: [
    oneOf(
      data.passes[0].measures.map((m) => m.name),
      START.beside,
    ),
    String,
  ],
  scale: [oneOf(["head", "layer", "all"], "head"), String],
  axis: [oneOf(["frame", "position"], "frame"), String],
  list: [oneOf(["layer", "all"], "layer"), String],
  kind: [(word) => word.slice(0, 20), String],
  min: [number, (x) => x ?? ""],
  max: [number, (x) => x ?? ""],
  sort: [oneOf(Object.keys(COLUMNS), ""), String],
  descending: [(word) => word !== "0", (yes) => (yes ? 1 : 0)],
  pins: [pinsOf, (pins) => pins.map(([i, j]) => `${data.layers[i]}.${j}`).join("_")],
  theme: [oneOf(["", "light", "dark"], ""), String],
  language: [oneOf(["", "en", "zh"], ""), String],
};

function readLink() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const [name, [read]] of Object.entries(LINK))
    state[name] = words.has(name) ? read(words.get(name)) : START[name];
}

// Layer and head, and whatever is not as at the start
function writeLink() {
  const words = new URLSearchParams();
  for (const [name, [, write]] of Object.entries(LINK)) {
    const word = String(write(state[name]));
    if (name === "layer" || name === "head" || word !== String(write(START[name]))) words.set(name, word);
  }
  if (location.hash.slice(1) === words.toString()) return;
  try {
    history.replaceState(null, "", `#${words}`);
  } catch {
    /* a browser may refuse many in a short time */
  }
}
