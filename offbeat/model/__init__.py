"""A worker's copy of the model: batch in, gradient out."""
