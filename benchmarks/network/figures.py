"""All that is measured between hosts."""

from benchmarks.figure import Figure
from benchmarks.network.accuracy import to_accuracy
from benchmarks.network.agreement import agreement
from benchmarks.network.exchange import exchange
from benchmarks.network.rates import rates
from benchmarks.scale import Scale


def network(scale: Scale) -> list[Figure]:
    """Exchanges, whole runs, and what the simulator says of the same."""
    return [*exchange(scale), *rates(scale), *to_accuracy(scale), *agreement(scale)]
