"""What a swarm of given machines would do with a given model, before anything starts: counted, not tried."""
