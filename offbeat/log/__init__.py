"""The ordered record of a run: its records, its files, and how they are read."""
