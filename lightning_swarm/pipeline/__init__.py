"""The trainer side of a swarm: microbatches, their routes, and the autograd function around them."""
