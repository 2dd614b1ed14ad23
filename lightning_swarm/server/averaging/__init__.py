"""Averaging of a stage's gradients among its peers."""
