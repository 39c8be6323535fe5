"""Optional parts, each applied to a model or a rollout from outside; who applies one imports it by name."""
