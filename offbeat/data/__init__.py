"""Which samples a worker gets, and the batches made of them."""
