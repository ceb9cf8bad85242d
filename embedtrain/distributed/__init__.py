"""Process group, device mesh, sharding, collectives and weights."""
