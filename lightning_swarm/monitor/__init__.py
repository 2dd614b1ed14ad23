"""What people see of a run: status of all peers, the doctor, the terminal view."""
