"""The miniature of checkpoints/wan-mini: the videos it is trained on, how, and what is seen of it."""
