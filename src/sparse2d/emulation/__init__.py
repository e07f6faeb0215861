"""2D without ranks: M replicas of all tables in one process, with the updates that real ranks make."""
