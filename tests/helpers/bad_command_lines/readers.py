"""Bad command lines of the scripts that read caches, run notebooks, train and measure the miniature."""

from helpers.bad_command_lines import NO_DISK

EAGLE = "cache/published/self_forcing_dmd_eagle_21f.pt"
CASES: dict[str, list[list[str]]] = {
    "layers_from_atlas": [
        ["--no_such_flag"],
        [],
        ["{}/none.pt"],
        ["{}/layer.pt"],
        ["{}/list.pt"],
        ["{}/text.txt"],
        ["{}/folder"],
        ["{}/bytes.bin"],
        ["{}/atlas.pt", "--layers", "99"],
        ["{}/atlas.pt", "--layers", "x"],
        ["{}/atlas.pt", "--step", "99"],
        ["{}/atlas.pt", "--output_dir", NO_DISK],
    ],
    "match_curve": [
        ["--no_such_flag"],
        ["--cache_path", "{}/none.pt"],
        ["--cache_path", "{}/text.txt"],
        ["--step", "x"],
        *(
            ["--cache_path", "{}/atlas.pt", "--curves", f"{{}}/{name}"]
            for name in ("none.csv", "text.txt", "bytes.bin", "empty", "folder")
        ),
    ],
    "layer_page": [
        ["--no_such_flag"],
        [],
        *([f"{{}}/{name}"] for name in ("none.pt", "text.txt", "bytes.bin", "list.pt", "folder", "empty")),
        ["{}/atlas.pt", "--output_path", f"{NO_DISK}/page.html"],
        *(
            ["{}/atlas.pt", "--maps", f"{{}}/{name}"]
            for name in ("none.pt", "atlas.pt", "text.txt", "folder")
        ),
        ["{}/atlas.pt", "--output_path", "{}/folder"],
        ["."],
        ["/"],
    ],
    "contact_sheet": [
        ["--no_such_flag"],
        [],
        ["{}/sheet.svg"],
        ["{}/sheet.svg", "A={}/none.svg"],
        ["{}/sheet.svg", "A"],
        *(["{}/sheet.svg", f"A={{}}/{name}"] for name in ("text.txt", "bytes.bin", "empty", "folder")),
    ],
    "run_notebooks": [
        ["--no_such_flag"],
        [],
        ["none.ipynb", EAGLE, "1"],
        ["extract_all_attention.ipynb", "{}/none.pt", "1"],
        *(["extract_all_attention.ipynb", f"{{}}/{name}", "1"] for name in ("text.txt", "list.pt", "folder")),
        *(
            ["extract_all_attention.ipynb", EAGLE, *more]
            for more in (
                ["99"],
                ["x"],
                ["3-1"],
                ["1", "--jobs", "0"],
                ["1", "--jobs", "x"],
                ["1", "--output_dir", NO_DISK],
                ["1", "--output_dir", "{}/text.txt"],
            )
        ),
    ],
    "train_mini": [
        ["--no_such_flag"],
        [],
        ["--stage", "none"],
        ["--stage", "base", "--output_dir", "{}/folder"],
        ["--stage", "base", "--start_from", "{}/folder"],
        ["--stage", "causal", "--start_from", "{}/folder"],
        ["--stage", "few_step", "--output_dir", "{}/folder"],
        ["--stage", "vae", "--minutes", "x"],
        ["--stage", "vae", "--device", "abacus"],
        ["--stage", "vae", "--batch", "x"],
        ["--stage", "vae", "--output_dir", NO_DISK],
        ["--stage", "vae", "--output_dir", "{}/text.txt"],
        ["--stage", "vae", "--batch", "0"],
        ["--stage", "vae", "--steps", "0"],
        ["--stage", "vae", "--steps", "99999999999999999999"],
        ["--stage", "vae", "--minutes", "nan"],
        ["--stage", "vae", "--seed", str(2**70)],
        ["--stage", "vae", "--kinds", "x"],
        ["--stage", "vae", "--clips", "1", "--steps", "1", "--output_dir", "{}/folder", "--resume"],
        ["--stage", "vae", "--training_checkpoints", NO_DISK],
        ["--stage", "vae", "--log", f"{NO_DISK}/log.json"],
    ],
    "evaluate_mini": [
        ["--no_such_flag"],
        ["--captions", "x"],
        ["--captions", "-1"],
        ["--pasts", "0"],
        ["--clips", "0"],
        ["--long_videos", "99999999999999999999"],
        ["--workers", "x"],
        ["--workers", "-1"],
        ["--workers", "1025"],
        ["--config_path", "{}/none.yaml"],
        ["--config_path", "{}/text.txt"],
        ["--ckpt_dir", "{}/none"],
        ["--device", "abacus"],
        ["--output_path", f"{NO_DISK}/out.json"],
        ["--output_path", "{}/folder"],
    ],
    "measure_checkpoints": [
        ["--no_such_flag"],
        [],
        ["{}/none"],
        ["{}/folder"],
        ["{}/text.txt"],
        ["{}/folder", "--steps", "x"],
        ["{}/folder", "--captions", "x"],
        ["{}/training", "--config_path", "{}/none.yaml"],
        ["{}/training", "--output_path", f"{NO_DISK}/out.json"],
        ["{}/training", "--steps", "9"],
        ["{}/training", "--extend", "--output_path", "{}/text.txt"],
        ["{}/training", "--captions", "0"],
    ],
    "measure_moments": [["--no_such_flag"], [], ["{}/none"]],
}
