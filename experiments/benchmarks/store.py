"""Measure a store of activations: seconds and GB to write it, seconds and memory to read its rows shuffled.

    python experiments/benchmarks/store.py outputs/acts --captions 200 --output_path store.json

Captions are the miniature's held-out ones. A folder that has runs already is added to, and their seconds are
not counted. Memory is what the process holds beyond the beginning, sampled every 20 ms: its own, and resident
pages of mapped files. Files' pages in the system's cache are in neither; after writing they are mostly there,
so reading is from memory unless the cache is dropped.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event, Thread

import psutil

from experiments import ActivationStore, capture, load
from experiments.caches.files import save_report
from experiments.extraction.provenance import environment
from experiments.miniature.moving_shapes import HELD_OUT_SEED, sample_scenes
from experiments.running.cli import Parser, count, main


@contextmanager
def measured(found: dict[str, float], name: str) -> Iterator[None]:
    """Note seconds, those of the CPU, and the largest memory beyond that of the beginning, in MB."""
    process, done, sizes = psutil.Process(), Event(), list[tuple[int, int]]()

    def sample() -> None:
        while True:
            now = process.memory_info()
            sizes.append((now.rss - now.shared, now.shared))
            if done.wait(0.02):
                return

    watch, begin, worked = Thread(target=sample, daemon=True), time.perf_counter(), time.process_time()
    watch.start()
    try:
        yield
    finally:
        found[f"{name}_seconds"] = round(time.perf_counter() - begin, 2)
        found[f"{name}_cpu_seconds"] = round(time.process_time() - worked, 2)
        done.set()
        watch.join()
        for kind, values in zip(("own", "mapped"), zip(*sizes, strict=True), strict=True):
            found[f"{name}_peak_{kind}_mb"] = round((max(values) - values[0]) / 1e6, 1)


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("folder", type=Path, help="where the store is written, or added to")
    flag("--config_path", default="wan_mini", help="a config's name or path")
    flag("--site", default="resid_post", help="of wan/sites.py; all layers, blocks and steps are captured")
    flag("--captions", type=count, default=200, help="how many videos, one a caption")
    flag("--batch", type=count, default=4, help="videos generated together")
    flag("--num_frames", type=count, default=21, help="latent frames of a video")
    flag("--size", type=count, default=4096, help="rows of a batch that is read")
    flag("--output_path", type=Path, help="a JSON of the numbers")
    args = parser.parse_args(argv)

    session = load(args.config_path, num_frames=args.num_frames).prepare()
    captions = [scene.caption for scene in islice(sample_scenes(HELD_OUT_SEED, held_out=True), args.captions)]
    found: dict[str, float] = {}
    # 1. Write: a caption has its number as seed.
    with measured(found, "write"), capture(session, args.site, stream_to=args.folder):
        for first in range(0, len(captions), args.batch):
            some = captions[first : first + args.batch]
            session.generate(some, seeds=[*range(first, first + len(some))])
    files = [path.stat().st_size for path in args.folder.rglob("*.safetensors")]
    found |= {"runs": len(captions), "files": len(files), "gb": round(sum(files) / 1e9, 3)}
    # 2. Read: every row of each layer once, in a random order.
    seconds = list[float]()
    with measured(found, "read"):
        store = ActivationStore(args.folder)
        for layer in range(session.model_config.num_layers):
            begin, rows = time.perf_counter(), 0
            for x in store.batches(args.site, layer, size=args.size):
                rows += len(x)
            seconds.append(time.perf_counter() - begin)
    found |= {"rows_of_a_layer": rows, "bytes_of_a_batch": x.element_size() * x.shape[1] * args.size}
    found["read_seconds_of_a_layer"] = round(statistics.median(seconds), 2)
    for name, value in found.items():
        print(f"{name:24} {value}")
    if args.output_path:
        names = ("config_path", "site", "captions", "batch", "num_frames", "size")
        asked = {name: getattr(args, name) for name in names}
        save_report(asked | found | {"environment": environment(session.device)}, args.output_path)


if __name__ == "__main__":
    main(run)
