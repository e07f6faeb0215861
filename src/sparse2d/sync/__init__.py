"""What, when and how the replicas of a shard are averaged."""
