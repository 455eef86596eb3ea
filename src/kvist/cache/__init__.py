"""The cache: pages and their identity, the pool, the prefix index, tiers, and the memory that a forward pass reads."""
