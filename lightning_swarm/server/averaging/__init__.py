"""Averages a stage's gradients among its replicas."""
