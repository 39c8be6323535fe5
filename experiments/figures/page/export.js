// The view as files: SVG of the drawings, CSV of the listed heads and of one matrix.

// The style of drawings on paper, without variables
const STYLE = DRAWING_STYLE;

// -> one SVG: what was measured, then the drawings as they stand
function viewAsSvg() {
  let y = 0,
    width = 0,
    body = "";
  const rows = [["map", "map2", "heads"], ["matrix", "profile"], ["keys"], ["onvideo"], ["compare"]].map((ids) =>
    ids.map($).filter(isShown),
  );
  for (const row of rows.filter((some) => some.length)) {
    let x = 12,
      tall = 0;
    for (const svg of row) {
      const [, , w, h] = svg.getAttribute("viewBox").split(" ").map(Number);
      const at = `x="${x}" y="${y}" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}"`;
      body += `<svg ${at}>${svg.innerHTML}</svg>`;
      x += w + 16;
      tall = Math.max(tall, h);
    }
    width = Math.max(width, x);
    y += tall + 18;
  }
  const lines = titleOf(Math.floor(width / 6)).map((words, k) =>
    text(12, 20 + 16 * k, words, k ? "soft" : "strong"),
  );
  const top = 16 * lines.length + 20;
  const [w, h] = [round(width), round(y + top)];
  const size = `width="${w}" height="${h}" viewBox="0 0 ${w} ${h}"`;
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" ${size}><metadata>${escaped(data.source)}</metadata>` +
    `<style>${STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>${lines.join("")}` +
    `<g transform="translate(0 ${top})">${body}</g></svg>\n`
  );
}

// Lines of at most so many letters that say what was measured
function titleOf(letters) {
  const lines = [`${data.model}: ${about().label}, ${pass().label}`.slice(0, letters), ""];
  for (const word of `${nameOf([state.layer, state.head])}. ${data.source}`.split(" ")) {
    if (`${lines.at(-1)} ${word}`.length > letters) lines.push("");
    lines.push(`${lines.pop()} ${word.slice(0, letters)}`.trim());
  }
  return lines;
}

const isShown = (svg) => svg.getClientRects().length > 0 && svg.hasAttribute("viewBox");

const csvCell = (x) =>
  !there(x)
    ? ""
    : typeof x === "number"
      ? String(Number(x.toPrecision(6)))
      : `"${String(x).replaceAll('"', '""')}"`;
const csv = (rows) => rows.map((row) => `${row.map(csvCell).join(",")}\n`).join("");

// A row for each listed head
function headsAsCsv() {
  const q = state.quantity,
    measures = pass().measures,
    statistics = ["first", "middle", "last", "delta", "ratio", "max_frame"],
    names = statistics.filter((name) => columnsShown().includes(name));
  const keys = Array.from({ length: C }, (_, f) => `${q}_${f < F ? `frame_${f}` : `average_${f - F + 1}`}`);
  const header = [
    "layer",
    "head",
    "pass",
    "kind",
    ...measures.map((m) => m.name),
    ...names.map((name) => `${q}_${name}`),
    ...keys,
  ];
  const rows = listed().map(([i, j]) => [
    data.layers[i],
    j,
    pass().label,
    pass().kinds?.[i][j] ?? "",
    ...measures.map((m) => m.values[i][j]),
    ...names.map((name) => COLUMNS[name][1](i, j)),
    ...profileOf(i, j),
  ]);
  return csv([header, ...rows]);
}

// A row for each cell that was attended; averages of gone frames are keys μ1, μ2, ...
function matrixAsCsv() {
  const values = matrixOf(state.layer, state.head) ?? [];
  const keyOf = (k) => (k < F ? k : data.averages[k - F]);
  const rows = values.map((x, k) => [Math.floor(k / C), keyOf(k % C), x]).filter(([, , x]) => there(x));
  return csv([["query_frame", "key_frame", state.quantity], ...rows]);
}

// Letters that every system takes
function fileName(ending, part) {
  const model =
    data.model
      .replace(/[^A-Za-z0-9.-]+/g, "_")
      .replace(/^[_.]+/, "")
      .slice(0, 40) || "model";
  return `${model}_${part}_pass${state.pass}_${state.quantity}.${ending}`;
}

function save(name, kind, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const here = () => `layer${data.layers[state.layer]}_head${state.head}`;

$("save-svg").addEventListener("click", () => save(fileName("svg", here()), "image/svg+xml", viewAsSvg()));
$("save-csv").addEventListener("click", () =>
  save(
    fileName("csv", state.list === "all" ? "heads" : `layer${data.layers[state.layer]}`),
    "text/csv",
    headsAsCsv(),
  ),
);
$("save-matrix").addEventListener("click", () => save(fileName("csv", here()), "text/csv", matrixAsCsv()));
