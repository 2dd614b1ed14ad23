"""Runs microbatches through the stages of the swarm, and recovers those whose peers fail."""
