"""One process of the swarm: how it starts, leads or follows, serves stages, fails over and leaves."""
