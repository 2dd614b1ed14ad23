"""What takes the place of Lightning's automatic optimization: one swarm step is one ``global_step``.

`optimization.py` runs batches and waits for records; `counters.py` says where a step ends by Lightning's own,
`through.py` knows the batches that no record counts yet, `schedulers.py` moves schedulers once for each record.
"""

from lightning_swarm.loop.optimization import SwarmOptimization as SwarmOptimization
