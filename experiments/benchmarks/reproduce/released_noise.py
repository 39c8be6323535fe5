"""Compare `noise: released` with the public scripts' calls on this GPU, bit for bit, for every release.

python experiments/benchmarks/reproduce/released_noise.py --output_path docs/benchmarks/released_noise.json

Also compares the noise that is computed for this card with what the card draws. docs/real_model.md quotes it.
"""

from dataclasses import replace
from pathlib import Path

import torch

from experiments.benchmarks.harness import save_report
from experiments.benchmarks.rows import released
from experiments.extraction.devices import choose_device
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, main
from wan.blocks import block_ranges
from wan.config import CARDS, MODELS, RunConfig, load_config
from wan.noise import released_noise


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--card", choices=CARDS, default="H100", help="which of the known cards this one is")
    parser.add_argument("--output_path", type=Path)
    args = parser.parse_args(argv)
    device, report = choose_device(args.device), {}
    for name in released():
        config = replace(load_config(f"configs/{name}.yaml"), noise="released")
        channels = MODELS[config.model].in_dim
        noise, renoise = released_noise(config, channels, device)
        public_noise, public_renoise = public_calls(config, channels, device)
        computed, between = released_noise(replace(config, noise=args.card), channels, device)
        apart = torch.cat([(computed - noise).flatten(), (between - renoise).flatten()]).float().abs()
        report[name] = {
            "same_bits": torch.equal(noise, public_noise) and torch.equal(renoise, public_renoise),
            f"computed for {args.card}: equal values": round((apart == 0).float().mean().item(), 6),
            "largest difference": apart.max().item(),
        }
        print(name, report[name])
    save_report({"environment": environment(device), "releases": report}, args.output_path)


def public_calls(config: RunConfig, channels: int, device: torch.device):
    """Make the calls of inference.py and its pipeline, on the global generator, in their order."""
    torch.manual_seed(config.seed)
    frame, dtype = (channels, config.height, config.width), torch.bfloat16
    noise = torch.randn([1, config.num_frames, *frame], device=device, dtype=dtype)
    blocks = block_ranges(config.block_sizes)
    lists = [config.first_block_steps or config.denoising_step_list, config.denoising_step_list]
    steps = max(map(len, lists))
    renoise = torch.zeros(steps - 1, *noise.shape, device=device, dtype=dtype)
    if config.sampler == "blocks":
        for number, own in enumerate(blocks):
            denoised = noise[:, own.start : own.stop]
            for step in range(len(lists[min(number, 1)]) - 1):
                renoise[step, :, own.start : own.stop] = torch.randn_like(denoised.flatten(0, 1))
        return noise, renoise
    for window in range(len(blocks) + steps - 1):
        first, last = max(0, window - steps + 1), min(len(blocks) - 1, window)
        start, stop = blocks[first].start, blocks[last].stop
        denoised = noise[:, start:stop]
        for block in range(first, last + 1):
            if window - block == steps - 1:
                continue  # the last step of its block: nothing is drawn
            own = blocks[block]
            drawn = torch.randn_like(denoised.flatten(0, 1))[own.start - start : own.stop - start]
            renoise[window - block, :, own.start : own.stop] = drawn
    return noise, renoise


if __name__ == "__main__":
    main(run)
