"""The data of a run with one or several trainers: an epoch's batches have one order, whichever trainers read them.

All trainers list the batches of the same samplers, drawn with the same random numbers. The lead's plan of an epoch
contains these random numbers and a digest of its list. So a number identifies a batch, and no sample index is sent.
Each trainer reads its part of the epoch (its *lane*) ahead, with the workers of its DataLoader (`loader.py`). The
coordinator leases each batch to a trainer (`coordinator/step/leases.py`), and a waiting trainer may read a batch that
another trainer left. `shared.py` is one trainer's view of the data. The batches of an iterable dataset have no numbers:
of n trainers, each reads every n-th sample.
"""
