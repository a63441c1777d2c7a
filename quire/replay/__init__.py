"""Runs a load again: a recorded one on the real engine, to the bit, or any load on a cost table in virtual time."""
