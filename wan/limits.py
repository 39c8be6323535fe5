"""The most of everything that can be counted: checked before anything is made from the number.

Each limit lies far beyond any model or video of today, and low enough that a wrong number cannot fill the
memory.
"""

MAX_LAYERS = 256  # of a transformer or an encoder; Wan2.1 14B has 40
MAX_SIZE = 1 << 18  # width, heads, vocabulary: any other number in a model's config
MAX_RES_BLOCKS = 16  # of each width of a VAE; Wan's has 2
MAX_LIST = 64  # numbers in a list of a model's config
MAX_COUNT = 1 << 17  # frames, tokens per frame or heads in a cache
MAX_FRAMES = 1 << 14  # latent frames of one rollout: 68 minutes of video
MAX_SIDE = 1 << 10  # of a latent frame: videos of 8192 pixels
MAX_STEPS = 10_000  # of the base model's sampler
MAX_DENOISING_STEPS = 100  # of a block
MAX_SCALE = 1000.0  # shift of noise levels, guidance
MAX_GPUS = 4096  # of one rollout
MAX_PROMPTS = 100_000  # of a sweep
MAX_NAME = 200  # characters of a model's name, which titles carry
MAX_PATH = 4096  # characters
MAX_TEXT = 100_000  # characters of a prompt; the encoder reads 512 tokens

CONFIG_BYTES = 1 << 18  # of a YAML file
JSON_BYTES = 1 << 26  # of a JSON file: a large tokenizer has 20 MB
TEXT_BYTES = 1 << 26  # of any other text: prompts, curves

SEED_BITS = 64  # signed
