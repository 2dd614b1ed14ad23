"""The records that peers exchange, each module for one kind of conversation."""
