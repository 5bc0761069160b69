"""A replica over several processes: its stages, what passes between them, how it is cut."""
