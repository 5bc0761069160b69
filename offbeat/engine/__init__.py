"""What runs workers and store: an engine supplies the clock, the links, spawning and waiting."""
