"""Optional parts: each is applied to a model or a rollout from outside, and imported only by its caller."""
