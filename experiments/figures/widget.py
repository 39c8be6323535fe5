"""The page of all layers and heads as a live widget of a notebook: the same drawing code, in a frame.

    from experiments.figures.widget import AttentionPage
    page = AttentionPage("../cache/atlas.pt")        # in a cell of its own: page
    page.layer, page.head = 5, 10                    # moves the page; a click in it sets them

It needs the extra `widget`: pip install -e ".[widget]".
"""

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from experiments.figures.html_page import MAX_MB, page_of

RENDER = """
// trait -> its name in the page
const NAMES = { layer: "layer", head: "head", pass_number: "pass", measure: "measure" };
function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts allow-downloads");
  frame.srcdoc = model.get("page");
  Object.assign(frame.style, { width: "100%", height: `${model.get("height")}px`, border: "0" });
  const toPage = () => {
    const wanted = Object.entries(NAMES).map(([trait, name]) => [name, model.get(trait)]);
    frame.contentWindow?.postMessage(Object.fromEntries(wanted), "*");
  };
  const fromPage = (event) => {
    if (event.source !== frame.contentWindow) return;
    for (const [trait, name] of Object.entries(NAMES)) model.set(trait, event.data[name]);
    model.save_changes();
  };
  frame.addEventListener("load", toPage);
  addEventListener("message", fromPage);
  for (const trait of Object.keys(NAMES)) model.on(`change:${trait}`, toPage);
  el.append(frame);
  return () => removeEventListener("message", fromPage);
}
"""


class AttentionPage(anywidget.AnyWidget):
    """The page of a cache. layer, head, pass_number and measure are what it shows, and change with it."""

    _esm = f"{RENDER}\nexport default {{ render }};"
    page = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int(900).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(0).tag(sync=True)
    pass_number = traitlets.Int(0).tag(sync=True)
    measure = traitlets.Unicode("first_frame_effect").tag(sync=True)

    def __init__(self, cache: str | Path, max_mb: float = MAX_MB, **options: Any):
        """Make the page. options are layers, video, maps, compare of page_of, and traits such as height."""
        of_page = {
            name: options.pop(name) for name in ("layers", "video", "maps", "compare") if name in options
        }
        super().__init__(page=page_of(cache, max_mb=max_mb, **of_page), **options)
