"""The pages of the API reference: which objects each has, under the names by which people import them.

A plain table, which needs no mkdocs: hooks.py makes pages of it, and tests run the examples.
"""

# page -> title, objects and the members of each; none is named: without members
PAGES = {
    "session": (
        "Load, generate, capture",
        """experiments.load
        experiments.Session: generate model vae
        experiments.Run: video save show
        experiments.capture
        experiments.Captured: calls tables words save atlas
        experiments.compare
        experiments.captured.Comparison: psnr video save show
        experiments.x0_lens
        experiments.captured.Lens: distance frames plot""",
    ),
    "gradients": (
        "Gradients and attribution",
        """experiments.gradients
        experiments.SiteGradients: backward tables save
        experiments.attribute
        experiments.Scores: open table plot save""",
    ),
    "edits": (
        "Edits",
        """experiments.intervene
        experiments.at
        wan.interventions.Edit
        experiments.Knockout
        experiments.Bias
        experiments.Ablate
        experiments.Patch
        experiments.Steer
        experiments.Move
        experiments.Band
        experiments.Jitter
        experiments.Source
        experiments.named""",
    ),
    "caches": (
        "Atlases, profiles, stores",
        """experiments.Atlas: open layers units axes view layer plot mean compare save
        experiments.captured.MeanAtlas: interval std plot
        experiments.ActivationStore: runs check rows
        experiments.caches.activations.StoredRun: read tables latents
        experiments.caches.store.load_cache
        experiments.caches.view.open_profiles
        experiments.caches.view.Profiles: values""",
    ),
    "policies": (
        "Cache policies",
        """wan.cache.CachePolicy: capacity start admit positions query_positions written layout flush
        wan.cache.WindowedPolicy: admit evict
        wan.cache.KVCache: append keep drop view tokens
        wan.cache.Window
        wan.policies.frames.Relative
        wan.policies.frames.DeepSink
        wan.policies.frames.Participative
        wan.policies.frames.EmaSink
        wan.policies.frames.TwoMemories
        wan.policies.frames.RollingSink
        wan.policies.frames.MemoryBank
        wan.policies.frames.PerHead
        wan.policies.headwise.DummyForcing
        wan.policies.headwise.ForcingKV
        wan.policies.headwise.TriAttention
        wan.policies.frames.HeadBudget""",
    ),
    "miniature": (
        "The miniature: scenes and tracker",
        """experiments.miniature.moving_shapes.Scene: caption kind
        experiments.miniature.moving_shapes.held_out_scenes
        experiments.miniature.moving_shapes.sample_scenes
        experiments.miniature.moving_shapes.scene_of
        experiments.miniature.moving_shapes.render_videos
        experiments.miniature.tracking.judge
        experiments.miniature.tracking.judge_by_caption
        experiments.miniature.tracking.judge_seconds
        experiments.miniature.tracking.in_sight
        experiments.miniature.tracking.track
        experiments.miniature.tracking.Track: seen color_name shape_name direction""",
    ),
}
# Examples of objects whose docstrings have none
EXAMPLES = {
    "load_cache": 'load_cache("cache/atlas.pt")["frame_mass"].shape',
    "CachePolicy": 'load("wan_mini", num_frames=6, cache_policy=Window(window=6, sink=1))',
    "WindowedPolicy": """
class Earliest(WindowedPolicy):
    \"\"\"Keep the first frames instead of the newest.\"\"\"

    name = "earliest"
    keeps_whole_frames = True

    def evict(self, cache, count):
        cache.drop(len(cache.slots) - count, count)


load("wan_mini", num_frames=6, cache_policy=Earliest(window=6, sink=0))
""",
    "KVCache": """
def keep_every_second(cache: KVCache) -> None:
    cache.keep(range(0, len(cache.slots), 2))
""",
    "sample_scenes": "next(iter(sample_scenes(0))).caption",
    "in_sight": "in_sight(scene_of(prompt), 64)",
    "Comparison": 'compare(run, edited).save("outputs/edited.mp4")',
    "Lens": "x0_lens(session, prompt, layers=[4], blocks=[0]).distance",
    "open_profiles": 'open_profiles(load_cache("cache/atlas.pt"), step=4).values(layer=5)',
    "Profiles": "atlas.view(step=4).values(layer=5).profile",
    "Scene": '[scene.caption for scene in held_out_scenes(["wall"], 2)]',
    "held_out_scenes": '[scene.caption for scene in held_out_scenes(["wall"], 2)]',
    "scene_of": "scene_of(prompt).movers[0].color",
    "render_videos": 'render_videos(held_out_scenes(["crossing"], 1), 81)',
    "judge": "judge(edited.video.permute(0, 3, 1, 2) / 255, scene_of(prompt))",
    "judge_by_caption": "judge_by_caption(edited.video.permute(0, 3, 1, 2) / 255, prompt)",
    "judge_seconds": "judge_seconds(edited.video.permute(0, 3, 1, 2) / 255, scene_of(prompt)).right",
    "track": "track(edited.video.permute(0, 3, 1, 2) / 255, in_sight(scene_of(prompt), 64)).direction",
    "Track": "track(edited.video.permute(0, 3, 1, 2) / 255, in_sight(scene_of(prompt), 64)).color_name()",
}
# Each policy runs by its settings on the miniature
POLICY_SETTINGS = {
    "Window": "window,window=9,sink=3",
    "Relative": "relative,window=12,sink=3",
    "DeepSink": "deep_sink,window=21,sink=10",
    "Participative": "deep_forcing",
    "EmaSink": "ema_sink,window=9,sink=3",
    "TwoMemories": "memrope",
    "RollingSink": "rolling_sink,window=21",
    "MemoryBank": "memflow",
    "PerHead": "mini_pyramid_heads",
    "DummyForcing": "mini_dummy_forcing",
    "ForcingKV": "mini_forcing_kv",
    "TriAttention": "mini_triattention",
    "HeadBudget": "head_budget",
}
for name, settings in POLICY_SETTINGS.items():
    EXAMPLES[name] = f'load("wan_mini", num_frames=6, cache_policy="{settings}")'


def objects_of(page: str) -> dict[str, list[str]]:
    """Return the objects of a page -> the members of each that it shows."""
    _, lines = PAGES[page]
    shown = {}
    for line in lines.splitlines():
        path, _, members = line.strip().partition(":")
        shown[path] = members.split()
    return shown
