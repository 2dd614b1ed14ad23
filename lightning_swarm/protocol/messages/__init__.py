"""The messages that peers exchange, grouped by subject. All are msgpack structs; none is ever unpickled."""
