"""Layouts as values: their text, their figures, and what is refused before anything starts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob
from offbeat.split.layout import SCHEDULES, as_layout


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (ob.Layout(), "pp=1"),
        (ob.Layout(pp=2), "pp=2"),
        (ob.Layout(2, 3, 2, "gpipe", 8), "replicas=2,pp=3,tp=2,schedule=gpipe,microbatches=8"),
        (ob.Layout(pp=3, split=("blocks.2", "head")), "pp=3,split=blocks.2+head"),
        (ob.Layout(pp=2, split=["head"]), "pp=2,split=head"),
        (ob.Layout(pp=2, split=("time",)), "pp=2,split=time+"),
        (ob.Layout(pp=2, split="count", precision="bf16"), "pp=2,split=count,precision=bf16"),
        (ob.Layout(pp=2, schedule="interleaved:3"), "pp=2,schedule=interleaved:3"),
    ],
)
def test_text_both_ways(layout: ob.Layout, text: str) -> None:
    assert str(layout) == text
    assert as_layout(text) == layout == as_layout(layout)
    assert hash(as_layout(text)) == hash(layout)


@settings(deadline=None, max_examples=50)
@given(
    replicas=st.integers(1, 3),
    pp=st.integers(1, 4),
    tp=st.integers(1, 3),
    schedule=st.sampled_from(SCHEDULES),
    microbatches=st.none() | st.integers(1, 12),
    split=st.sampled_from(["time", "parameters", "count"]),
)
def test_whatever_is_accepted_can_be_read_back(**settings: Any) -> None:
    try:
        layout = ob.Layout(**settings)
    except ob.ConfigError:
        return
    assert ob.Layout.parse(str(layout)) == layout
    assert layout.processes == layout.replicas * layout.pp * layout.tp
    assert layout.pieces >= 1


def test_microbatches_are_by_default_as_few_as_fill_the_pipeline() -> None:
    assert ob.Layout(pp=4).pieces == 4
    assert ob.Layout(pp=4, schedule="layers").pieces == 1
    assert ob.Layout(pp=4, microbatches=8).microbatch(32) == 4
    assert ob.Layout(pp=2, schedule="interleaved").stages == 4
    assert ob.Layout(pp=2, schedule="interleaved:3").stages == 6


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pp=0", "pp must be a whole number of at least 1, not 0; write pp=1"),
        ("pp=two", "pp must be a whole number"),
        ("2", "'2' has no name; write for example pp=2"),
        ("pq=2", "unknown 'pq'; a layout takes replicas, pp, tp"),
        ("schedul=gpipe", "(did you mean 'schedule'?)"),
        ("schedule=1f1", "not '1f1' (did you mean '1f1b'?)"),
        ("precision=fp8", "precision must be one of float32, bf16, fp16"),
        ("pp=4,microbatches=3", "needs at least 4 microbatches, not 3: write microbatches=4"),
        ("pp=4,schedule=zero-bubble,microbatches=2", "needs at least 4 microbatches"),
        ("pp=2,schedule=layers,microbatches=2", "leave microbatches out"),
        ("pp=2,schedule=interleaved,microbatches=5", "write microbatches=4"),
        ("schedule=interleaved", "write pp=2, or leave the schedule out"),
        ("pp=2,schedule=interleaved:1", "or schedule=1f1b for one"),
        ("pp=2,schedule=gpipe:3", "write schedule=gpipe"),
        ("pp=3,split=head", "3 stages need 2 names in split"),
        ("pp=2,split=+", "split must be one of time, parameters, count or names"),
        ("pp=2,pp=3", "'pp' is given twice"),
    ],
)
def test_mistakes_name_their_remedy(text: str, told: str) -> None:
    with pytest.raises(ob.ConfigError) as error:
        ob.Layout.parse(text)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("layout", "batch", "told"),
    [
        ("pp=4,microbatches=8", 30, "write microbatches=6 or a batch size of 32"),
        ("pp=4", 6, "write microbatches=6 or a batch size of 8"),
        ("pp=4", 3, "microbatches: write a batch size of 4"),
        ("pp=2,schedule=interleaved,microbatches=4", 6, "write microbatches=2 or"),
        ("pp=2", 0, "at least one sample"),
    ],
)
def test_a_batch_must_divide(layout: str, batch: int, told: str) -> None:
    with pytest.raises(ob.ConfigError) as error:
        ob.Layout.parse(layout).microbatch(batch)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"pp": True}, {"pp": 2.0}, {"split": 3}, {"split": ()}, {"split": (1,)}, {"schedule": None}],
)
def test_wrong_types_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ob.ConfigError):
        ob.Layout(**settings)
    with pytest.raises(ob.ConfigError, match="Layout or a string"):
        as_layout(3)  # type: ignore[arg-type]
