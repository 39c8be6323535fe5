"""The default reference set of mean ablation: subjects, cameras and styles that lie apart."""

REFERENCE_PROMPTS = (
    "A majestic eagle soaring through a cloudy sky, cinematic lighting",
    "An old fisherman repairs a net on a pier at dawn",
    "A busy street market at night, neon signs, handheld camera",
    "Close-up of rain drops running down a window, a city out of focus behind it",
    "A white cat jumps from a kitchen table to a chair",
    "Aerial view of a river delta in autumn, slow forward flight",
    "A watercolour animation of a paper boat drifting under a bridge",
    "Two dancers turn in an empty hall, long shadows on the floor",
)
