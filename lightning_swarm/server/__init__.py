"""The stage's side: computes calls, sums gradients, averages them, and takes optimizer steps."""
