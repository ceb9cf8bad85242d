"""Process group, mesh, sharding, collectives, and moving weights onto shards."""
