"""One description of a run: what is trained and how, checked once, and written to its folder."""
