"""Write the README's tables from the JSON of the benchmarks, so that no number in it is typed.

    python experiments/dev/readme_tables.py [README.md]

A table stands between "<!-- table: FILE.json -->" and "<!-- end of table -->".
"""

import json
import re
from pathlib import Path

from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError
from experiments.dev.benchmark_capture import as_table
from experiments.running.cli import Parser, main

SMALL, LARGE = "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B"

MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table(path: Path) -> str:
    """The rows of one benchmark, and under them what they were measured on."""
    report = json.loads(path.read_text())
    if SMALL in report:
        return real_table(report)
    if "captions" in report:
        return miniature_tables(report)
    return reading_table(report) if "streamed" in report else rollout_table(report)


def real_table(report: dict) -> str:
    """Disk, memory and times of the real models' shapes (experiments/dev/benchmark_memory.py)."""
    env, small, large = report["environment"], report[SMALL], report[LARGE]
    rows = {
        "21 frames": small["extract"]["resident"],
        "21 frames, `--offload`": small["extract"]["--offload"],
        "21 frames, `--prompt_embeds`": small["extract"]["resident, --prompt_embeds"],
        "72 frames, `--prompt_embeds`": small["extract"]["72 frames"],
        "14B, 3 frames": large["extract"]["one block"],
        "14B, 3 frames, `--offload`": large["extract"]["one block, --offload"],
    }
    lines = [
        "| every layer at 480 x 832, random weights of the same shapes | GPU: text, loading | GPU: rollout | "
        "/ predicted | host | text, loading | rollout |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {name} | {gb(row['prepare']['gpu_peak_bytes'])} | {gb(row['rollout']['gpu_peak_bytes'])} | "
        f"{row['measured_of_predicted']:.3f} x | {gb(row['host_private_bytes'])} | {row['prepare_seconds']:.1f} s | "
        f"{row['rollout_seconds']:.1f} s |"
        for name, row in rows.items()
    ]
    sizes, cold = small["files"], small["load"]["shards, from disk"]
    shards = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    encoder, tuned = (sizes[name] for name in ("models_t5_umt5-xxl-enc-bf16.pth", "self_forcing_dmd.pt"))
    disk = (
        f"Disk: {gb(shards + encoder + tuned + small['vae_bytes'])}: transformer {gb(shards)}, umT5 {gb(encoder)}, VAE "
        f"{gb(small['vae_bytes'])}, checkpoint {gb(tuned)}."
    )
    loading = (
        f"The transformer's shards load from disk in {cold['seconds']:.1f} s, with {gb(cold['host_private_bytes'])} of "
        f"private host memory; with mapped file pages {cold['resident_of_file']:.2f} x the files."
    )
    same = "the same bits" if small["offload_gives_the_same_bits"] else "OTHER BITS"
    where = f"{env['device']}, torch {env['torch']}, bfloat16, {env['date']}, `{env['git'][:9]}`"
    return "\n".join(lines) + (
        f"\n\n{disk} {loading} `--offload` gives {same}, latents and capture. GPU memory is that of "
        f"tensors, without CUDA's context; host memory is private. {where}: `{env['command']}`\n"
    )


def miniature_tables(report: dict) -> str:
    """What the miniature's videos show of held-out captions, and what its past is good for (experiments/evaluate_mini.py)."""
    env, vae, past = report["environment"], report["vae"], report["past"]
    sources = {
        "rendered": "rendered",
        "vae": "through the VAE",
        "causal": "causal, 4 steps",
        "base": "base, 50 steps, guided",
    }
    special = {"one shape": "landmark", "two that cross": "crossing", "behind a wall": "comes_back"}
    lines = [
        "| videos that show | colour | shape | background | direction | landmark, crossing, return |",
        "|---" * 6 + "|",
    ]
    for name, part in report["captions"].items():
        for source, words in sources.items():
            answers = part["shares"][source]
            shown = (answers[q] for q in ("color", "shape", "background", "direction", special[name]))
            lines.append(
                f"| {part['count']} captions, {name}: {words} | "
                + " | ".join(f"{x:.0%}" for x in shown)
                + " |"
            )
    lines += [
        "",
        f"| {past[0]['count']} shapes that go behind a wall; a block sees | hide | come back | in their colour | "
        "as their shape | all of it |",
        "|---" * 6 + "|",
    ]
    for row in past:
        answers = (row[q] for q in ("hides", "comes_back", "same_color", "same_shape", "same"))
        lines.append(f"| {window(row)} | " + " | ".join(f"{x:.0%}" for x in answers) + " |")
    psnr = (
        f"VAE on {vae['clips']} held-out clips of 81 frames: {vae['psnr']:.1f} dB, first second "
        f"{vae['psnr_first_second']:.1f}, last {vae['psnr_last_second']:.1f}."
    )
    where = f"{env['device']}, torch {env['torch']}, {env['date']}, `{env['git'][:9]}`"
    return "\n".join(lines) + f"\n\n{psnr} {where}: `{env['command']}`\n"


def window(row: dict) -> str:
    """The past that a rollout's blocks see, in words."""
    size, sink = row["local_attn_size"], row["sink_size"]
    if size < 0:
        return "all of its past"
    return (
        f"{size} frames, its own 3 among them" + (f", the first {sink} too" if sink else "")
        if size > 3
        else "itself alone"
    )


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def reading_table(report: dict) -> str:
    """Both ways of reducing a token cache to frames (experiments/dev/benchmark_reading.py)."""
    env, ways = (
        report["environment"],
        {"streamed": "by memory map, a few rows at a time", "converted": "to float32, then mean"},
    )
    lines = [
        f"| {report['file_mib']} MiB of float16 tokens to frames | open, compare checksums | reduce | private memory |",
        "|---" * 4 + "|",
    ]
    lines += [
        f"| {name} | {report[way]['open_seconds']:.2f} s | {report[way]['median_seconds']:.2f} s | "
        f"{report[way]['private_mib']:.0f} MiB |"
        for way, name in ways.items()
    ]
    where = f"{env['device']}, torch {env['torch']}, {env['date']}, `{env['git'][:9]}`"
    return (
        "\n".join(lines) + f"\n\nReduced {report['times_faster']:.1f} x faster; {where}: `{env['command']}`\n"
    )


def rollout_table(report: dict) -> str:
    """A rollout, plain and captured (experiments/dev/benchmark_capture.py)."""
    env = report["environment"]
    weights = " shapes, random weights" if report["random_weights"] else ""
    what = f"{report['model']}{weights}, {report['num_frames']} latent frames"
    where = f"{env['device']}, torch {env['torch']}, {report['dtype']}, {env['date']}, `{env['git'][:9]}`"
    return f"{as_table(report['rows'])}\n\n{what}; {where}: `{env['command']}`\n"


def fill(readme: str, root: Path) -> str:
    """The README with every marked table made anew."""
    return MARKED.sub(lambda found: found[1] + table(root / found[2]) + found[3], readme)


def run(argv=None):
    root = Path(__file__).parents[2]
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "readme", nargs="?", type=Path, default=root / "README.md", help="the file whose tables are made anew"
    )
    readme = parser.parse_args(argv).readme
    try:
        filled = fill(readme.read_text(encoding="utf-8"), root)
    except (json.JSONDecodeError, KeyError) as error:
        raise CacheError(f"a benchmark that {readme} names cannot be read: {error}") from None
    with replacing(readme) as file:
        file.write(filled.encode())


if __name__ == "__main__":
    main(run)
