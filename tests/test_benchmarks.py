"""How figures are counted, judged and shown, and that the measurements do run."""

import io
import json
import math
import tomllib
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import on_ray
from benchmarks.beside import measured
from benchmarks.figure import Figure, Peer, quantity
from benchmarks.local.exchange_process import rounds
from benchmarks.local.runs import Goal, GoalReached, Steps, mean_step, per_second
from benchmarks.network import accuracy, agreement, ddp, exchange, hosts, rates, runs
from benchmarks.peers.launch import PeerFailed, PeerMissing
from benchmarks.table import WIDTH, as_json, table, verdict
from offbeat.log.records import Evaluated, Part, Updated

FAST = Figure("exchange over the limit", 1.2, "x", at_most=1.25)
SLOW = replace(FAST, value=1.3)


def shown(*figures: Figure) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(table(figures))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "at_most", "at_least", "passed", "judged"),
    [
        (1.25, 1.25, None, True, "yes"),
        (1.26, 1.25, None, False, "NO"),
        (4.0, None, 4.0, True, "yes"),
        (3.9, None, 4.0, False, "NO"),
        (2.0, 3.0, 1.0, True, "yes"),
        (0.5, 3.0, 1.0, False, "NO"),
        (3.5, 3.0, 1.0, False, "NO"),
        (math.nan, 1.25, None, False, "NO"),
        (math.nan, None, 4.0, False, "NO"),
        (None, 1.25, None, None, "?"),
        (1.0, None, None, None, ""),
        (0.0, 0.0, None, True, "yes"),
    ],
)
def test_a_figure_is_judged_by_its_bounds(value, at_most, at_least, passed, judged):
    figure = Figure("it", value, "x", at_most=at_most, at_least=at_least)
    assert figure.passed is passed
    assert figure.judged == judged


def test_what_is_wanted_is_said_by_the_bounds_unless_in_words():
    assert FAST.wanted == "at most 1.25"
    assert Figure("it", 1.0, "x", at_least=4).wanted == "at least 4"
    assert Figure("it", 1.0, "x", at_least=1, at_most=2).wanted == "at most 2 and at least 1"
    assert Figure("it", 1.0, "x", wanted="less than DDP", at_most=2).wanted == "less than DDP"
    assert Figure("it", 1.0, "x").wanted == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234, "0.123 s"),
        (12.34, "12.3 s"),
        (99.99, "100 s"),
        (5200.4, "5,200 s"),
        (-250, "-250 s"),
    ],
)
def test_quantities_keep_three_digits_or_all_before_the_point(value, text):
    assert quantity(value, "s") == text


def test_a_peer_says_its_value_or_why_it_has_none():
    assert str(Peer("DDP", 155.2, "ms")) == "DDP 155 ms"
    assert str(Peer("DDP", 155.2, "ms", "2 ranks")) == "DDP 155 ms (2 ranks)"
    missing = Peer("Ray", None, "ms", "not installed: pip install offbeat[bench]")
    assert str(missing) == "Ray: not installed: pip install offbeat[bench]"
    assert str(Peer("Ray")) == "Ray: not measured"


def test_the_table_shows_figure_bound_judgement_and_peers_in_a_hundred_columns():
    peers = (Peer("gloo all-reduce", 155.2, "ms"), Peer("Ray", None, "ms", "not installed: get it"))
    text = shown(replace(SLOW, peers=peers, beside="a note " * 9), Figure("rest", None, "s"))
    for part in ("1.3 x", "at most 1.25", "NO", "gloo all-reduce 155 ms", "not measured"):
        assert part in text
    assert "not installed" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_brackets_in_a_note_are_text_and_not_markup():
    assert "offbeat[bench]" in shown(replace(FAST, beside="pip install offbeat[bench]"))


def test_the_verdict_counts_the_bounds_and_those_kept():
    figures = [FAST, SLOW, replace(FAST, value=None), Figure("no bound", 1.0, "x")]
    assert verdict(figures) == "1 of 3 bounds kept"


def test_json_holds_the_machine_and_every_figure_with_its_peers():
    whole = json.loads(as_json({"cores": 2}, [replace(SLOW, peers=(Peer("DDP", 2.5, "ms"),))]))
    assert whole["machine"] == {"cores": 2}
    (figure,) = whole["figures"]
    assert figure["value"] == 1.3
    assert figure["at_most"] == 1.25
    assert figure["wanted"] == "at most 1.25"
    assert figure["passed"] is False
    assert figure["peers"] == [{"name": "DDP", "value": 2.5, "unit": "ms", "note": ""}]


# ---------------------------------------------------------------- how runs are counted


def update(time: float, *workers: int) -> Updated:
    parts = [Part(worker, 1, 0, 0, [], samples=8) for worker in workers]
    return Updated(time, version=1, parts=parts)


def test_steps_are_kept_by_worker_however_they_were_applied():
    steps = Steps(2)
    for record in (update(1.0, 0), update(2.0, 0, 1), update(3.0, 1)):
        steps.see(record)
    assert steps.times == [[1.0, 2.0], [2.0, 3.0]]
    assert steps.heard.keys() == {0, 1}
    assert steps.heard[0] <= steps.heard[1]


def test_samples_per_second_leave_out_the_warm_up_and_the_end():
    fast = [0.0, 0.1, 5.0, *(6.0 + i for i in range(11))]  # one step a second, once it runs
    slow = [0.0, 0.1, 5.0, *(6.0 + 2 * i for i in range(4))]  # half of that, and gone after 12
    assert per_second([fast], batch=8) == pytest.approx(8.0)
    assert per_second([fast, slow], batch=8) == pytest.approx(12.0)
    # What one does when the other has left is no longer counted.
    hurried = [moment if moment <= 12 else 12 + (moment - 12) / 100 for moment in fast]
    assert per_second([hurried, slow], batch=8) == pytest.approx(12.0)


def test_a_mean_step_is_wall_time_times_workers_over_steps():
    assert mean_step([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]) == pytest.approx(1.0)
    assert mean_step([[0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5]]) == pytest.approx(3 * 2 / 6)


def test_a_goal_ends_the_run_at_the_first_test_that_reaches_it():
    goal = Goal(0.9)
    goal.see(Evaluated(1.0, version=1, samples=8, loss=0.5, accuracy=0.89))
    goal.see(Evaluated(2.0, version=2, samples=8, loss=0.5, accuracy=None))
    assert goal.seconds is None
    with pytest.raises(GoalReached):
        goal.see(Evaluated(3.0, version=3, samples=8, loss=0.5, accuracy=0.9))
    assert goal.seconds == 3.0


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_an_exchange_goes_through_a_real_server_and_back(rule, copied):
    found = rounds([[3, 5], [7]], repeats=2, rule=rule, copied=copied, hashed=False)
    for name in ("exchange", "limit", "private", "image"):
        assert len(found[name]) == 2
        assert min(found[name]) > 0
    assert found["threads"] == 1


# ---------------------------------------------------------------- what is missing or fails


def raising(error: Exception):
    def measure(*_: object):
        raise error

    return measure


def test_a_peer_that_is_missing_or_fails_is_shown_as_such():
    assert measured("DDP", "ms", lambda: 2.5) == Peer("DDP", 2.5, "ms")
    missing = measured("Ray", "ms", raising(PeerMissing("not installed: get it")))
    assert missing == Peer("Ray", None, "ms", "not installed: get it")
    failed = measured("Ray", "ms", raising(PeerFailed("ended without a word")))
    assert failed == Peer("Ray", None, "ms", "failed: ended without a word")


@pytest.mark.parametrize("name", ["accuracy", "article"])
def test_without_mnist_its_figures_say_what_to_write(name):
    figures = command.BENCHMARKS[name](command.QUICK)
    assert figures
    for figure in figures:
        assert figure.judged == "?"
        assert "--mnist FOLDER" in figure.beside


def run_command(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    command.main()


def test_a_group_that_fails_leaves_the_others_their_figures(monkeypatch, tmp_path, capsys):
    groups = {"one": raising(PeerFailed("no luck")), "two": lambda scale: [FAST]}
    monkeypatch.setattr(command, "BENCHMARKS", groups)
    file = tmp_path / "deep" / "bench.json"
    run_command(monkeypatch, "--quick", "--json", str(file))
    whole = json.loads(file.read_text())
    assert [figure["passed"] for figure in whole["figures"]] == [None, True]
    assert whole["figures"][0]["beside"] == "failed: no luck"
    assert whole["machine"]["quick"] is True
    assert "1 of 2 bounds kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "no benchmark 'nonsense'; there are share, scaling, sites"),
        (["--mnist", "/nowhere/at/all"], "is not a folder"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_measured(monkeypatch, capsys, words, said):
    with pytest.raises(SystemExit):
        run_command(monkeypatch, *words)
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- between hosts


def test_samples_over_hosts_leave_out_the_warm_up_and_the_end():
    def records(*pairs: tuple[float, int]) -> list[Updated]:
        return [update(time, worker) for time, worker in sorted(pairs)]

    fast = [(0.0, 0), (5.0, 0), *((6.0 + i, 0) for i in range(11))]
    slow = [(0.0, 1), (5.0, 1), *((6.0 + 2 * i, 1) for i in range(4))]
    assert runs.Outcome(records(*fast), {}, "").per_second() == pytest.approx(8.0)
    both = runs.Outcome(records(*fast, *slow), {}, "")
    assert both.per_second() == pytest.approx(12.0)
    assert both.per_second(warm_up=1) == pytest.approx(8 * 7 / 7 + 8 * 4 / 7)


def test_a_script_says_when_it_has_reached_its_goal():
    assert runs.Outcome([], {}, f"a line\n{runs.REACHED} 12.5\nmore").reached == 12.5
    assert runs.Outcome([], {}, "nothing of the kind").reached is None


@pytest.mark.parametrize("group", [exchange.exchange, rates.rates, agreement.agreement])
def test_where_no_hosts_can_be_made_the_figures_say_why(monkeypatch, group):
    for module in (exchange, rates, agreement):
        monkeypatch.setattr(module, "why_not", lambda delay=False: "no luck")
    for figure in group(command.QUICK):
        assert figure.judged == "?"
        assert figure.beside == "no luck"


def test_seconds_to_an_accuracy_over_hosts_want_mnist(monkeypatch):
    monkeypatch.setattr(accuracy, "why_not", lambda: "")
    (figure,) = accuracy.to_accuracy(command.QUICK)
    assert figure.judged == "?"
    assert "--mnist FOLDER" in figure.beside


def test_the_best_of_ours_stands_beside_ddp(monkeypatch, tmp_path):
    found = {one.sync: 40.0 + 10 * index for index, one in enumerate(accuracy.CONTENDERS)}
    monkeypatch.setattr(accuracy, "why_not", lambda: "")
    monkeypatch.setattr(accuracy, "_seconds", lambda scene, one: found[one.sync])
    monkeypatch.setattr(accuracy, "_ddp", lambda scene: 400.0)
    (figure,) = accuracy.to_accuracy(replace(command.QUICK, mnist=tmp_path))
    assert figure.value == pytest.approx(10.0)
    assert figure.passed
    best = accuracy.CONTENDERS[0].sync
    assert best in figure.what
    found[best] = None
    (figure,) = accuracy.to_accuracy(replace(command.QUICK, mnist=tmp_path))
    assert figure.value == pytest.approx(8.0)
    assert f"{best}, int8: not reached" in map(str, figure.peers)


def test_every_scenario_is_described_for_the_simulator():
    scenarios = agreement.scenarios(6)
    assert len(scenarios) == len({one.what for one in scenarios}) == 8
    for one in scenarios:
        found = tomllib.loads(agreement.cluster_of(one))
        assert len(found["host"]) == len(found["worker"]) == len(one.scene.emulate)
        assert found["store"]["in"] == found["host"][0]["up"]
        assert ("outages" in found["host"][0]) == one.cut


@pytest.fixture
def namespaces() -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)


def test_exchanges_between_hosts_are_timed(namespaces):
    found = exchange.measure(exchange.Wire(bits=1e8), floats=1000, repeats=2)
    assert {name: len(seconds) for name, seconds in found.items()} == {"raw": 2, "exchange": 2}
    assert min(map(min, found.values())) > 0


def test_a_run_over_hosts_and_ddp_over_the_same(namespaces):
    scene = runs.Scene((0.0, 0.001), 1e8, "weights:1000", 1, steps=8)
    found = runs.train(scene, "--sync", "asp", *rates.INT8)
    assert found.per_second() > 0
    assert found.summary["wire_bytes"] > 0
    assert not found.summary["turned_away"]
    with scene.hosts() as made:
        assert ddp.train(made.all[1:], scene)["per_second"] > 0


def test_without_ray_its_group_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(on_ray.importlib.util, "find_spec", lambda name: None)
    (figure,) = on_ray.on_ray(command.QUICK)
    assert figure.beside == "not installed: pip install offbeat[bench]"


def test_folders_in_the_place_of_hosts_leave_nothing_behind():
    with on_ray.folders(2) as (one, two):
        assert (one.address, one.folder != two.folder) == (two.address, True)
        held = one.run("sleep", "1000")
        done = two.run("pwd", stdout=on_ray.subprocess.PIPE, text=True)
        assert done.communicate()[0].strip() == str(two.folder)
    assert held.poll() == -9
    assert not one.folder.exists()
