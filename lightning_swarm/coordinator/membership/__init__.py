"""Which servers and trainers belong to a run, and which stages the servers hold."""
