"""The data of a run that several trainers may bring: one order of all batches, whichever trainer reads them.

All trainers list the same samplers with the same random numbers, which the lead's plan of an epoch brings with a
digest of what it listed. So a number names a batch, and no index travels. Each trainer reads a lane of the epoch ahead,
with the workers that its DataLoader has (`loader.py`); the coordinator leases each batch to a trainer (its
`step/leases.py`), and a trainer that waits for others reads an extra batch. `shared.py` keeps a trainer's view of it
all. An iterable dataset has no numbers: each trainer takes every n-th sample.
"""
