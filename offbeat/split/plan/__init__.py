"""How a model is cut into stages, and what that would cost: measured, predicted, explained."""
