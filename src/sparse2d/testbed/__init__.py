"""Hosts in miniature: network namespaces on one machine, slow between each other and fast inside, for real ranks."""
