"""Tensors on torch's meta device get their values later: what is done to them is written down, and done again.

So a model that fits nowhere is built as its author wrote it, and any part of it comes to the very values that it would
have if all of it had been built on a device, random ones included.

The idea is that of `deferred_init` in torchdistX.

`recording.py` writes down, `redoing.py` does again, `notes.py` is what is written.
"""

from lightning_swarm.blueprint.notes import Place as Place
from lightning_swarm.blueprint.recording import Blueprint as Blueprint
