"""Capture the last block's attention of chosen layers with wan/ alone: what a reader walks through at least.

PYTHONPATH=. python tests/helpers/figure4_script.py --out outputs/figure4.pt
"""

import argparse

import torch

from wan import checkpoint
from wan.capture import CaptureRequest
from wan.config import load_config
from wan.model import CausalWanModel
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.pipeline import CausalInferencePipeline
from wan.policies import policy_of
from wan.text_encoder import TextEncoder

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--config", default="configs/wan_mini.yaml")
parser.add_argument("--layers", type=int, nargs="+", default=[1, 5])
parser.add_argument("--out", default="outputs/figure4.pt")
args = parser.parse_args()

c = load_config(args.config, {})
device, dtype = torch.device("cpu"), torch.float32
sizes = checkpoint.read_model_config(c.ckpt_dir)
state, _ = checkpoint.read_weights(c, sizes)
model = checkpoint.build_model(
    CausalWanModel,
    sizes,
    state,
    c.checkpoint_path,
    dtype,
    device,
    local_attn_size=c.local_attn_size,
    sink_size=c.sink_size,
)
encoder = TextEncoder.from_pretrained(c.ckpt_dir, sizes.text_len, device=device, dtype=dtype)
pipe = CausalInferencePipeline(
    model,
    c.num_frame_per_block,
    c.independent_first_frame,
    c.denoising_step_list,
    c.warp_denoising_step,
    c.timestep_shift,
    c.context_noise,
    encoder,
    cache_policy=policy_of(c),
)

generator = torch.Generator().manual_seed(c.seed)
shape = (1, c.num_frames, sizes.in_dim, c.height, c.width)
noise = torch.randn(shape, generator=generator)
renoise = torch.randn(len(c.denoising_step_list) - 1, *shape, generator=generator)
request = CaptureRequest(layers=args.layers, blocks=[len(c.block_sizes) - 1], steps=[0], granularity="frame")
with ATTENTION_WEIGHT_CAPTURE.capture(request) as calls:
    pipe.inference(noise, text_prompts=[c.prompt], renoise=renoise)
torch.save(
    [{"layer": call["layer"], **{name: value[0] for name, value in call.values.items()}} for call in calls],
    args.out,
)
