"""Train one large PyTorch Lightning model on a swarm of slow, unequal, unreliable machines."""

__version__ = "0.1.0"
