"""The second tier behind the agent: pages of other nodes, from a store that the cluster shares."""
