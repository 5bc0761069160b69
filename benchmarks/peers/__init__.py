"""Other ways to do what offbeat does, and the limits of the machine, measured beside it."""
