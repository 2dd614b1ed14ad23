"""The model as the swarm sees it: partition into stages, boundary layers, keyed randomness, state formats."""
