"""How a worker reaches the store: one seam, whatever lies between them."""
