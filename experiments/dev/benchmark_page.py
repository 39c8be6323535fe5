"""How large the HTML page is, how long it takes to open, and how long to draw another head, layer or pass.

    python experiments/dev/benchmark_page.py --output_path docs/benchmarks/page.json

The page is that of a random atlas of 30 layers x 12 heads, five passes, mean logits and mass. Headless
Chromium opens it from disk. A redraw is one choice: the script's time with layout, without painting.
"""

import argparse
import tempfile
import time
from pathlib import Path

from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import Parser, main

FRAMES = (21, 72)
LAYERS, HEADS, PASSES = 30, 12, 5

REDRAWS = {  # what is chosen -> change of the page's state, alternating
    "another head": ("{ head: 1 }", "{ head: 2 }"),
    "another layer": ("{ layer: 1 }", "{ layer: 2 }"),
    "another pass": ("{ pass: 1 }", "{ pass: 2 }"),
    "the other quantity": ("{ quantity: 'mass' }", "{ quantity: 'mean_logit' }"),
    "one scale for all heads": ("{ scale: 'all' }", "{ scale: 'head' }"),
    "another pin": ("{ pins: [[0, 0], [1, 1]] }", "{ pins: [[0, 0], [2, 2]] }"),
    "all heads, sorted": ("{ list: 'all', sort: 'delta' }", "{ list: 'all', sort: 'ratio' }"),
}

TIMED = """(() => {{
  const times = [];
  for (let i = 0; i < {repeats}; i++) {{
    const start = performance.now();
    choose(i % 2 ? {odd} : {even});
    document.body.offsetHeight;
    times.push(performance.now() - start);
  }}
  return times.sort((a, b) => a - b)[{repeats} >> 1];
}})()"""


def table(report: dict) -> str:
    """Sizes and times by number of frames."""
    pages = report["pages"]
    header = (f"page of {report['what']}", *(f"{page['num_frames']} frames" for page in pages))
    rows = [
        ("size", *(f"{page['bytes'] / 1e6:.1f} MB" for page in pages)),
        ("bytes a cell", *(str(page["cell_bytes"]) for page in pages)),
        ("write it", *(f"{page['write_seconds']:.1f} s" for page in pages)),
        ("open it, first drawing", *(f"{page['open_ms']:.0f} ms" for page in pages)),
    ]
    rows += [(f"draw {name}", *(f"{page['redraw_ms'][name]:.0f} ms" for page in pages)) for name in REDRAWS]
    return f"{markdown(header, rows)}\n\n{report['browser']}; {measured_on(report['environment'])}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, nargs="+", default=FRAMES, help="latent frames, in blocks of 3")
    parser.add_argument("--repeats", type=int, default=21, help="redraws of each kind; their median counts")
    parser.add_argument("--output_path", help="write the numbers as JSON")
    args = parser.parse_args(argv)
    if min(args.frames) < 3 or any(F % 3 for F in args.frames):
        parser.error(f"--frames must be multiples of 3, not {' '.join(map(str, args.frames))}")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, not {args.repeats}")
    measure(args)


def measure(args: argparse.Namespace) -> None:
    import torch

    from experiments.caches.files import RunError, require_writable
    from experiments.dev import chromium
    from experiments.dev.tables import save_report
    from experiments.extraction.provenance import environment

    if args.output_path:
        require_writable(args.output_path)
    if not chromium.FOUND:
        raise RunError("Chromium is not installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = chromium.Browser(Path(folder) / "profile")
        version = browser.send("Browser.getVersion")["product"]
        pages = [measure_page(browser, Path(folder), F, args.repeats) for F in args.frames]
        browser.close()
    for page in pages:
        redraws = ", ".join(f"{name} {ms:.0f} ms" for name, ms in page["redraw_ms"].items())
        size = f"{page['num_frames']} frames: {page['bytes'] / 1e6:.1f} MB"
        print(f"{size}, open {page['open_ms']:.0f} ms, {redraws}")
    what = f"{LAYERS} x {HEADS} heads, {PASSES} passes, logits and mass"
    report = {
        "what": what,
        "browser": version,
        "environment": environment(torch.device("cpu")),
        "pages": pages,
    }
    save_report(report, args.output_path)


def measure_page(browser, folder: Path, F: int, repeats: int) -> dict:
    """Size and times of the page of F frames."""
    from experiments.caches import save_cache
    from experiments.figures.html_page import save_page

    cache, page = folder / f"{F}.pt", folder / f"{F}.html"
    save_cache(cache, random_atlas(F))
    start = time.perf_counter()
    save_page(page, cache)
    written = time.perf_counter() - start
    browser.open(f"file://{page}", 1280, 900)
    opened = browser.js("performance.getEntriesByType('navigation')[0].loadEventEnd")
    redraws = {}
    for name, (even, odd) in REDRAWS.items():
        browser.js(TIMED.format(repeats=2, even=even, odd=odd))  # decodes what it needs
        redraws[name] = browser.js(TIMED.format(repeats=repeats, even=even, odd=odd))
        browser.js("choose({ ...START })")
    return {
        "num_frames": F,
        "bytes": page.stat().st_size,
        "cell_bytes": browser.js("Object.values(data.passes[0].matrices)[0].bytes"),
        "write_seconds": written,
        "open_ms": opened,
        "redraw_ms": redraws,
    }


def random_atlas(F: int) -> dict:
    """An atlas cache of F frames: random logits with a preference for frame 0, and their softmax."""
    import torch

    from wan.blocks import later_block

    blocks, timesteps = [3] * (F // 3), [1000.0, 937.5, 833.33, 625.0, 0.0]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYERS, PASSES, HEADS, F, F, generator=generator) + 2 * (torch.arange(F) == 0)
    hidden = later_block(blocks)
    mass = logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, torch.nan)
    return {
        "format": "atlas",
        "schema_version": 1,
        "prompt": "random",
        "seed": 0,
        "num_frames": F,
        "num_frame_per_block": 3,
        "frame_seq_length": 1,
        "block_sizes": blocks,
        "num_heads": HEADS,
        "model": "random",
        "weights": "unknown",
        "weights_file": None,
        "weights_sha256": None,
        "is_logits": True,
        "layers": list(range(LAYERS)),
        "pass_timesteps": timesteps,
        "pass_steps": list(range(PASSES)),
        "frame_logits": logits.masked_fill(hidden, torch.nan),
        "frame_mass": mass,
    }


if __name__ == "__main__":
    main(run)
