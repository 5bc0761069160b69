"""Lists of disciplines, devices and rates as text."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.compare.spell import read_devices, read_disciplines, read_rates
from offbeat.discipline.named import ROWS
from offbeat.errors import ConfigError


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["bsp,ssp:3,asp,local:16,asup"], ["bsp", "ssp:3", "asp", "local:16", "asup"]),
        (["fedbuff:2,2,asp"], ["fedbuff:2,2", "asp"]),
        (["asup:lr=0.002,momentum=0.5,bsp"], ["asup:lr=0.002,momentum=0.5", "bsp"]),
        (["switch:(bsp,asp,at=25%),asp"], ["switch:(bsp,asp,at=25%)", "asp"]),
        (["local:4,keep,asp"], ["local:4,keep", "asp"]),
        (["local:4,reset,average:4"], ["local:4,reset", "average:4"]),
        (["asp", "ssp:1 , bsp,"], ["asp", "ssp:1", "bsp"]),
        (["ssp:1,weigh=inverse,bsp"], ["ssp:1,weigh=inverse", "bsp"]),
        (
            ["custom:send=gradient,gather=count(2),wait=3,asp"],
            ["custom:send=gradient,gather=count(2),wait=3", "asp"],
        ),
    ],
)
def test_lists_of_disciplines(texts: list[str], found: list[str]) -> None:
    assert list(read_disciplines(texts)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bsp,sp:3", "unknown discipline 'sp' (did you mean 'ssp'?)"),
        ("bsp,aps", "unknown discipline 'aps' (did you mean 'asp'?)"),
        ("ssp:3,aps", "unknown discipline 'aps' (did you mean 'asp'?)"),
        ("ssp:3,bsp,ssp:slack=3", "ssp:slack=3 is listed twice"),
        ("asup:lr=fast,momentum=0.9", "lr must be a number"),
        ("switch:bsp,asp,at=25%", "in a list switch:(bsp,asp,at=25%)"),
        ("2,asp", "unknown discipline '2'"),
        (" , ", "there is no discipline to compare"),
    ],
)
def test_mistakes_in_a_list_of_disciplines(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_disciplines([text])
    assert words in str(refused.value)


# rows that ask for a number
NUMBERED = ("soft", "ssp", "ringmaster", "rennala")


@given(st.lists(st.sampled_from([n for n in ROWS if n not in NUMBERED]), unique=True))
def test_a_list_of_names_is_these_names(names: list[str]) -> None:
    if names:
        assert [one.partition(":")[0] for one in read_disciplines([",".join(names)])] == names


def test_rates_and_devices_as_text() -> None:
    assert read_rates(["0.1", "asp=0.05", "asp:weigh=inverse=0.2"]) == {
        "": 0.1,
        "asp": 0.05,
        "asp:weigh=inverse": 0.2,
    }
    assert read_devices("1, 8") == (1, 8)
    for read in (
        partial(read_rates, ["fast"]),
        partial(read_rates, ["0.1", "0.2"]),
        partial(read_devices, "1,two"),
    ):
        with pytest.raises(ConfigError):
            read()
