"""Views of a run for people: the status of all peers, the doctor, and the terminal view."""
