"""Benchmarks: each module prints a table from one run and, where there is something to see, draws a picture.

`make bench` runs those that the Makefile names; `README.md` has all of them, with how long they take.
"""
