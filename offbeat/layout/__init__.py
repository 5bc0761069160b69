"""How one replica is split over processes: the value, its blocks and stages, and what it costs."""
