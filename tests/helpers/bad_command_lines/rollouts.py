"""Bad command lines of the scripts that make rollouts."""

from helpers.bad_command_lines import MINI, NO_DISK

EXTRACTIONS = (
    *("run_extraction", "run_extraction_all", "run_extraction_each", "run_extraction_figure4"),
    "run_extraction_maps",
)


def rollout_cases() -> list[list[str]]:
    """What every rollout script must refuse; {} is the folder of wrong files."""
    bad = [
        ["--no_such_flag"],
        ["--config_path", "{}/none.yaml"],
        ["--checkpoint_path", "{}/none.pt"],
        ["--ckpt_dir", "{}/none"],
        *(
            [flag, f"{{}}/{name}"]
            for flag in ("--config_path", "--checkpoint_path")
            for name in ("text.txt", "bytes.bin", "empty", "list.pt", "layer.pt", "folder")
        ),
        *(["--ckpt_dir", f"{{}}/{name}"] for name in ("text.txt", "folder")),
        *([flag, "many"] for flag in ("--num_frames", "--seed", "--gpu_id", "--step")),
        ["--num_frames", "-3"],
        ["--num_frames", "0"],
        ["--num_frames", "1.5"],
        ["--step", "99"],
        ["--device", "abacus"],
        ["--seed"],
        ["--log_file", f"{NO_DISK}/log"],
        ["--save_video", f"{NO_DISK}/v.mp4"],
        ["--seed", str(2**70)],
    ]
    return [(flags if flags[0] == "--config_path" else [*MINI, *flags]) for flags in bad]


CASES: dict[str, list[list[str]]] = {
    name: [
        *rollout_cases(),
        [*MINI, "--output_path", f"{NO_DISK}/out.pt"],
        [*MINI, "--output_path", "{}/folder"],
        [*MINI, "--output_path", "", "--save_video"],
    ]
    for name in EXTRACTIONS
}
CASES["run_extraction"] += [
    [*MINI, *f] for f in (["--blocks", "9"], ["--layer_indices", "x"], ["--steps", "7"], ["--capture", "x"])
]
CASES["run_extraction_all"] += [
    [*MINI, *f]
    for f in (
        ["--prompts", "{}/bytes.bin", "--output_dir", "{}/o"],
        ["--seeds", "x"],
        ["--seeds", "1", "--output_dir", NO_DISK],
        ["--prompts", "{}/folder", "--output_dir", "{}/o"],
    )
]
CASES["run_extraction_all"] += [
    [*MINI, *f]
    for f in (
        ["--cache_policy", "no_such_policy"],
        ["--cache_policy", "{}/none.yaml"],
        ["--cache_policy", "{}/text.txt"],
        ["--cache_policy", "x" * 5000],
        ["--prompt_schedule", "{}/none.yaml"],
        ["--prompt_schedule", "{}/text.txt"],
        ["--prompt_schedule", "x" * 5000],
        ["--gpus", "0"],
        ["--gpus", "x"],
        ["--gpus", "5", "--device", "cpu"],
        ["--gpus", "2", "--seeds", "1", "--output_dir", "{}/o"],
        ["--checkpoints", "{}/none.pt", "--output_dir", "{}/o"],
        ["--checkpoints", "base"],
    )
]
CASES["run_extraction_each"] += [
    [*MINI, *f] for f in (["--layer_index", "8"], ["--output_dir", NO_DISK], ["--granularity", "x"])
]
CASES["run_extraction_figure4"] += [
    [*MINI, *f] for f in (["--layer_indices", "-1"], ["--granularity", "x"], ["--capture", "x"])
]
CASES["run_extraction_maps"] += [
    [*MINI, *f]
    for f in (
        *(
            ["--query_patch", word]
            for word in ("99,0,0", "a,b", "1,-1,0", "-1,0,0", "18,4,0", "18,0,4", "", "1,2")
        ),
        ["--query_patch", "18,1,1", "18,1,1"],
        ["--query_patch", "9" * 30 + ",0,0"],
        *(["--query_frame", word] for word in ("21", "-1", "x")),
        ["--query_frame", "3", "3"],
        *(["--query_grid", word] for word in ("18,0,4", "18,5,4", "21,2,2", "x")),
        ["--heads", "12"],
        ["--heads", "-1"],
        ["--layer_indices", "9"],
        ["--blocks", "9"],
        ["--blocks", "0", "--query_patch", "18,0,0"],
        ["--steps", "7"],
        ["--step", "3", "--steps", "0"],
        ["--cache_policy", "forcing_kv_heads"],
    )
]
CASES |= {
    name: [
        *rollout_cases(),
        [*MINI, "--interventions", "{}/none.yaml"],
        *(
            [*MINI, "--interventions", f"{{}}/{file}"]
            for file in ("text.txt", "bytes.bin", "empty", "folder")
        ),
        [*MINI, "--ablate_heads", "{}/empty", "--ablate_passes", "all"],
        [*MINI, "--ablate_heads", "{}/none.csv", "--ablate_passes", "all"],
        [*MINI, "--ablate_heads", "{}/empty"],
        [*MINI, "--ablate_passes", "some"],
        *more,
    ]
    for name, more in {
        "run_intervention": [
            [*MINI],
            [*MINI, "--output_path", f"{NO_DISK}/out.pt"],
            [*MINI, "--interventions", "/dev/zero"],
        ],
        "run_causal_atlas": [
            ["--each", "token"],
            ["--batch", "0"],
            ["--edit", "{}/none.yaml", *MINI],
            [*MINI, "--each", "token"],
            [*MINI, "--edit", "{}/text.txt"],
            [*MINI, "--batch", "0"],
            [*MINI, "--output_dir", NO_DISK],
            *(
                [*MINI, "--output_dir", "{}/o", *f]
                for f in (
                    ["--output_path", "{}/x.pt"],
                    ["--save_video"],
                    ["--step", "3"],
                    ["--overwrite"],
                    ["--no-overwrite"],
                )
            ),
        ],
    }.items()
}
CASES |= {
    "run_rollout": [
        *rollout_cases(),
        *(
            [*MINI, *f]
            for f in (
                ["--capture", "some"],
                ["--capture", "last:0"],
                ["--capture", "band"],
                ["--num_frames", "4"],
                ["--output_path", "{}/o.avi"],
                ["--output_path", "{}/folder"],
                ["--output_path", f"{NO_DISK}/o.mp4"],
                ["--save_video"],
                ["--cache_policy", "no_such_policy"],
            )
        ),
    ],
    "compare_policies": [
        ["--no_such_flag"],
        ["--policies", "no_such_policy"],
        ["--policies", "window,window"],
        ["--policies", "window,window=x"],
        ["--policies", "window,window=3,sink=3"],
        ["--policies", "{}/text.txt"],
        ["--policies", "full", "--cache_policy", "full"],
        ["--num_frames", "4"],
        ["--prompts", "{}/empty"],
        ["--prompts", "{}/text.txt", "--held_out", "3"],
        ["--prompt", "a cat", "--held_out", "3"],
        ["--prompt", "a cat", "--controls", "frozen"],
        *(["--output_dir", "{}/o", *f] for f in (["--overwrite"], ["--save_video"], ["--output_path", "x"])),
        ["--held_out", "0"],
        ["--batch", "0"],
        ["--workers", "-1"],
        ["--workers", "1025"],
        ["--videos", "x"],
        ["--videos", "-1"],
        ["--output_dir", NO_DISK],
        ["--output_dir", "{}/text.txt"],
        ["--vbench_dir", NO_DISK, "--output_dir", "{}/o"],
        ["--capture", "last:x"],
        ["--vae_dtype", "int8"],
        ["--controls", "thawed"],
        ["--config_path", "{}/none.yaml"],
        ["--device", "abacus"],
    ],
    "extract_attention_wan": [
        ["--no_such_flag"],
        ["--ckpt_dir", "{}/none"],
        ["--ckpt_dir", "{}/folder"],
        ["--num_frames", "20"],
        ["--config_path", "{}/text.txt"],
        ["--config_path", "{}/none.yaml"],
        *(
            [*MINI, *f]
            for f in (
                ["--step", "x"],
                ["--num_steps", "0"],
                ["--shift", "x"],
                ["--layer_index", "9"],
                ["--output_dir", NO_DISK],
            )
        ),
    ],
}
