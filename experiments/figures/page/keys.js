// Under a cache policy: the keys of the last block along frames or positions, with what is special marked.

const KEYS_DRAWING = { left: 52, top: 30, h: 130, mark: 9 };

function drawKeys() {
  const keys = data.keys?.[state.axis];
  if (!keys) return;
  const g = KEYS_DRAWING,
    coded = keys.passes[state.pass][state.quantity],
    values = rowOf(coded, state.layer, state.head),
    labels = keys.labels[state.layer],
    marks = keys.marks[state.layer];
  const width = room("keys"),
    w = width - g.left - 8,
    step = w / values.length,
    range = rangeOf(scaledWith(coded, state.layer, state.head));
  const drawn = bars(values, g.left, g.top, w, g.h, range, [], values.length, values.length),
    [levelMarks, digits] = levels(...range);
  let lines = "",
    out = "";
  for (const v of levelMarks) {
    const y = drawn.zero - v * drawn.scale;
    lines += `M${g.left} ${round(y)}h${round(w)}`;
    out += text(g.left - 5, y + 3.5, show(v, digits), "end small");
  }
  marks.forEach((mark, n) => {
    if (mark) out += rect(g.left + n * step, g.top - 13, step, g.mark, at(`mark-${mark.split(" ")[0]}`));
  });
  const frames = labels.filter((label) => !label.startsWith("μ")).length;
  for (const k of ticks(frames, w < 260 ? 8 : 14))
    out += text(g.left + (k + 0.5) * step, g.top + g.h + 13, labels[k], "middle small");
  if (frames < labels.length)
    out += text(g.left + ((frames + labels.length) / 2) * step, g.top + g.h + 13, "μ", "middle small strong");
  const axis = state.axis === "frame" ? KEYS_AXIS : "Temporal position of the key";
  out +=
    text(g.left + w / 2, g.top + g.h + 28, axis, "middle") + upright(11, g.top + g.h / 2, about().label);
  put("keys", width, g.top + g.h + 34, line(lines, "grid") + drawn.out + out + legendOfKeys(marks, g));
}

// Each kind of mark once
function legendOfKeys(marks, g) {
  let x = g.left,
    out = "";
  for (const mark of new Set(marks.filter((one) => one))) {
    out += rect(x, 2, 10, 7, at(`mark-${mark.split(" ")[0]}`)) + text(x + 14, 9, mark, "small");
    x += 26 + 6 * mark.length;
  }
  return out;
}
