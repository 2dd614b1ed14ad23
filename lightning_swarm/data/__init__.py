"""The data of a run that several trainers may bring: one order of all batches, whoever reads them.

All trainers list the same samplers with the same random numbers, which the lead's plan of an epoch brings with a digest
of what it listed: `listing.py`, `random_numbers.py`. So a number names a batch, and no index travels. Each reads a lane
of the epoch ahead, with the workers that its DataLoader has (`loader.py`); who coordinates says which batch is whose
(`steps.places`), and a trainer that waits for others reads one besides. `sharing.py` is what a trainer knows of it all.
An iterable dataset has no numbers: `part.py`.
"""

from lightning_swarm.data.loader import SharedLoader as SharedLoader
from lightning_swarm.data.part import part_of as part_of
from lightning_swarm.data.random_numbers import own_generators as own_generators
from lightning_swarm.data.sharing import STATE as STATE
from lightning_swarm.data.sharing import SharedData as SharedData
from lightning_swarm.data.sharing import at_position as at_position
from lightning_swarm.data.sharing import can_share as can_share
