// Two pinned heads and their difference. Where one alone is pinned, the chosen head is the other.

const COMPARE = { gap: 14, left: 52, profile: 130 };

// Two heads with their passes and names, or null: pinned ones, else the chosen head in both caches
function compared() {
  const here = [state.layer, state.head];
  if (state.pins.length) {
    const [a, b = here] = state.pins;
    return [a, b].map((at, k) => ({ at, of: pass(), name: `${"AB"[k]}: ${nameOf(at)}` }));
  }
  if (!data.other) return null;
  return [pass(), otherPass()].map((of, k) => ({ at: here, of, name: `${"AB"[k]}: ${k ? data.other.name : data.name}` }));
}

const nameOf = ([i, j]) => `layer ${data.layers[i]}, head ${j}`;
const minus = (a, b) => a.map((x, k) => (there(x) && there(b[k]) ? x - b[k] : null));
const extremes = (lists) =>
  lists
    .flat()
    .filter(there)
    .reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [0, 0]);

function drawCompare() {
  const pair = compared();
  $("compare-box").hidden = !pair;
  if (!pair) return;
  const [a, b] = pair,
    matrices = pair.map((one) => matrixOf(...one.at, one.of)),
    profiles = pair.map((one) => profileOf(...one.at, one.of)),
    chosen = state.pins.length === 1;
  const titles = [a.name, `${b.name}${chosen ? " (chosen)" : ""}`, "A − B"];
  const [low, high] = extremes(matrices.flat().filter(there)),
    shared = rangeOf(extremes(profiles));
  const parts = [0, 1].map((k) => ({
    matrix: matrices[k],
    profile: profiles[k],
    scale: matrixScale(low, high),
    range: shared,
  }));
  const matrix = matrices[0] && matrices[1] && minus(...matrices),
    profile = minus(...profiles);
  const edge = matrix ? Math.max(...extremes([matrix]).map(Math.abs)) || 1 : 1;
  parts.push({ matrix, profile, scale: around(edge), range: rangeOf(extremes([profile])) });
  const g = COMPARE,
    width = room("compare"),
    columns = width < 520 ? 1 : 3,
    w = width / columns;
  const size = w - g.left - g.gap,
    tall = 22 + (matrix ? (F * size) / C + 64 : 0) + g.profile + 34;
  let out = "";
  parts.forEach((part, k) => {
    out += comparePart(part, titles[k], (k % columns) * w, Math.floor(k / columns) * tall, size);
  });
  put("compare", width, tall * Math.ceil(3 / columns), out);
  const q = data.query_frames;
  $("compare-note").textContent =
    `${about().label}, ${pass().label}; bars: mean over query frames ${q[0]}–${q[q.length - 1]}. ` +
    "A and B are on one scale, their difference is on its own." +
    (chosen ? " Choose another head, or pin it too." : "");
}

// Title, matrix with its colours, profile
function comparePart(part, title, x, y, size) {
  const g = COMPARE,
    left = x + g.left;
  let out = text(left, y + 14, title, "strong"),
    top = y + 22;
  if (part.matrix) {
    out +=
      matrixDrawing(part.matrix, round(left), round(top), size, part.scale) +
      frameLabels(left, top, size, 7, true);
    const high = (F * size) / C;
    out += colorBar(left, top + high + 28, size, part.scale, about().unit);
    top += high + 64;
  }
  const drawn = bars(part.profile, left, top, size, g.profile, part.range),
    [marks, digits] = levels(...part.range, 4);
  for (const v of marks)
    out += text(left - 5, drawn.zero - v * drawn.scale + 3.5, show(v, digits), "end small");
  out += keyLabels(left, top + g.profile + 13, size, 7);
  return out + drawn.out + text(left + size / 2, top + g.profile + 27, KEYS_AXIS, "middle small");
}

// What is pinned, each with a button that lets it go
function drawPins() {
  $("pins").replaceChildren(
    ...state.pins.map((pin, k) => {
      const button = document.createElement("button");
      button.textContent = `${"AB"[k]}: ${nameOf(pin)} ×`;
      button.setAttribute("aria-label", `unpin ${nameOf(pin)}`);
      button.addEventListener("click", () => choose({ pins: state.pins.filter((other) => other !== pin) }));
      return button;
    }),
  );
  const pinned = isPinned();
  $("pin").textContent = pinned ? "Unpin" : "Pin";
  $("pin").title = "two pinned heads are shown side by side, with their difference (key p)";
  $("pin").disabled = !pinned && state.pins.length === 2;
}

const isPinned = () => state.pins.some(([i, j]) => i === state.layer && j === state.head);

function togglePin() {
  const here = [state.layer, state.head];
  if (isPinned()) choose({ pins: state.pins.filter(([i, j]) => i !== here[0] || j !== here[1]) });
  else if (state.pins.length < 2) choose({ pins: [...state.pins, here] });
}
