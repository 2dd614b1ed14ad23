"""The trainer's side: a session with a run, its pipeline, and its calls to the coordinator."""
