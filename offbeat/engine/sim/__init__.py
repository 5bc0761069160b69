"""The simulated cluster: virtual time, real gradients, one process."""
