"""Predicts how fast a swarm of given machines trains a given model, by counting or by simulation."""
