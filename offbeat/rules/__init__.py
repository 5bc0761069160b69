"""What turns a gradient into new parameters, at the store or at a worker that makes local steps."""
