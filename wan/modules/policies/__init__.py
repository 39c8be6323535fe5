"""The cache policies, a few to a file (see wan/modules/cache_policies.py)."""
