"""The command line `swarm-node`."""
