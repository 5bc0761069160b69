"""One participant: what it sends, and the loop that computes, sends and pulls."""
