"""A worker's host is cut off without a word, under every discipline: for a moment, and for long."""

import pytest

from offbeat.log.records import Admitted, Refused
from tests.cluster.common import joins, lost, of, sent, site
from tests.contract.common import named

pytestmark = pytest.mark.cluster

WORKERS = 3
ROWS = named(WORKERS)
# Rows that differ only in what they do with numbers are cut off in the same way.
NAMES = [name for name in ROWS if not name.startswith(("asp-", "downpour-", "bmuf-"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_host_is_cut_off(name, tmp_path):
    with site(tmp_path, WORKERS) as here:
        here.begin("--sync", str(ROWS[name]))
        away = here.others[-1]
        worker = here.number(away)

        # For a moment, and until its connection has broken: the same one goes on where it was.
        for seen in (away.speaks_in_vain, away.dials_in_vain):
            away.cut()
            seen()
            away.heal()
            here.contributes(away, since=len(here.records()))
        records = here.records()
        assert joins(records, worker) == [1]
        assert not lost(records, worker)
        assert not [record for record in records if isinstance(record, Refused)]

        # For longer than patience: the others go on without it.
        away.cut()
        here.until(lambda records: lost(records, worker), f"worker {worker} is given up")
        here.goes_on(but=[away])

        # Back again it is another incarnation, and what it had under way does not count.
        away.heal()
        here.contributes(away, incarnation=2)
        here.ends_right()
        records = here.records()
        assert joins(records, worker) == [1, 2]
        assert len(lost(records, worker)) == 1
        assert {other for other in range(WORKERS) if len(joins(records, other)) > 1} == {worker}
        assert all(refused.incarnation == 1 for refused in of(records, Refused, worker))
        given_up = records.index(lost(records, worker)[0])
        waits = {admitted.sequence for admitted in of(records[:given_up], Admitted, worker)}
        later = [part for part in sent(records[given_up:]) if part.worker == worker]
        assert {part.sequence for part in later if part.incarnation == 1} <= waits

        # While it was silent nobody waited who has not to.
        silent = 1 + max(
            index
            for index, record in enumerate(records[:given_up])
            if worker in [part.worker for part in sent([record])]
        )
        meanwhile = {part.worker for part in sent(records[silent:given_up])}
        if ROWS[name].wait is None:
            assert meanwhile == set(range(WORKERS)) - {worker}
