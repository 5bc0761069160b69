"""What a run cost, read from its log alone."""
