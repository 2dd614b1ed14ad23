"""The data of a run with one or several trainers: all batches have one order, whichever trainer reads them.

All trainers list the same samplers with the same random numbers. The lead's plan of an epoch contains these numbers and
a digest of its listing. So a number names a batch, and no sample index travels. Each trainer reads its part of the
epoch (its *lane*) ahead, with the workers of its DataLoader (`loader.py`). The coordinator leases each batch to a
trainer (`coordinator/step/leases.py`), and a waiting trainer may read a batch that another trainer left. `shared.py`
is one trainer's view of the data. The batches of an iterable dataset have no numbers: of n trainers, each reads every
n-th sample.
"""
