"""The long version: many random clusters per discipline, each run counted, replayed and resumed."""

import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from tests.contract.common import (
    CODECS,
    NAMES,
    Records,
    Stop,
    StopAfter,
    check_run,
    clusters,
    examples,
    named,
    problem,
    recount,
    run,
    scratch,
    seeds,
)

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("name", NAMES)
@examples(60, local=10)
@given(cluster=clusters(faults=True), seed=seeds, codec=st.sampled_from(CODECS))
def test_count_replay_and_resume(engine, name, cluster, seed, codec):
    what, seen = problem(samples=30), Records()
    discipline = named(len(cluster))[name]
    how = {"cluster": cluster, "seed": seed, "codec": codec, "checkpoint_every": 3}
    with scratch() as folder:
        whole = run(engine, what, discipline, out=folder / "whole", listeners=[seen], **how)
        for epoch in recount(seen.all, 30, epochs=2):
            assert epoch["repeated"] == epoch["missing"] == 0
            assert epoch["applied"] + epoch["dropped"] == 30
        assert ob.replay(folder / "whole", *what).check().compared == whole.summary().updates
        after = random.Random(seed).randrange(1, len(seen.all))
        # A real second run may write fewer records than the first.
        with suppress(Stop) if engine == "local" else pytest.raises(Stop):
            run(engine, what, discipline, out=folder / "cut", listeners=[StopAfter(after)], **how)
        again = run(engine, what, discipline, out=folder / "cut", resume=True, **how)
        if engine == "local":  # in real time the order is another
            check_run(folder / "cut", what)
            return
        assert again.summary() == whole.summary()
        logs = [(folder / name / "log.jsonl").read_bytes() for name in ("whole", "cut")]
        assert logs[0] == logs[1]
