"""tests/ mirrors offbeat/: what a test is about, and where a module is tested, is in its name.

`tests/store/test_board.py` and `tests/store/test_board_*.py` test `offbeat/store/board.py`, and
`tests/cli/test_cli.py` the package itself.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = ROOT / "offbeat", ROOT / "tests"
SHORT = 100  # lines; what is shorter may be tested along with the module that uses it

# Tests of more than one module: of the whole, over every engine, or of what is written.
WHOLE = ("contract", "cluster", "independent")
WHOLES = {
    "discipline/test_nobody_asks.py": "reads the source of all packages",
    "transport/test_contract.py": "runs over every transport",
    "test_benchmarks.py": "tests benchmarks/",
    "test_coming_from.py": "runs examples/coming_from/",
    "test_construction.py": "reads the source of all packages",
    "test_docs.py": "runs the documentation",
    "test_imports.py": "reads the source of all packages",
    "test_mirror.py": "reads the names of all files",
    "test_public.py": "the public names",
    "test_readmes.py": "reads the documentation",
}

# Longer modules that are tested where they are used, with something that makes them work.
ELSEWHERE = {
    "cli/demo.py": "studies/test_demo.py",
    "cli/layout_run.py": "cli/test_layout.py",
    "cli/options.py": "cli/test_run.py",
    "cli/simulate.py": "cli/test_cli.py",
    "cli/source.py": "cli/test_run.py",
    "compare/place.py": "compare/test_runner.py",
    "compare/results.py": "compare/test_runner.py",
    "compare/speeds.py": "compare/test_plan.py",
    "config/describe.py": "config/test_run_config.py",
    "config/job.py": "config/test_setup.py",
    "config/task.py": "model/test_evaluation.py",
    "config/units.py": "engine/sim/test_compute_times.py",
    "data/order.py": "data/test_loader.py",
    "discipline/named.py": "discipline/test_discipline.py",
    "engine/bring_up.py": "test_train.py",
    "engine/hosts/admission.py": "transport/test_contract.py",
    "engine/hosts/doctor.py": "cli/test_store.py",
    "engine/hosts/torchrun.py": "test_join.py",
    "engine/local/launcher_messages.py": "engine/local/test_launcher.py",
    "engine/local/pipeline_group.py": "contract/test_layouts.py",
    "engine/local/plan.py": "contract/test_loaders.py",
    "engine/local/private_folder.py": "engine/local/test_rendezvous.py",
    "engine/local/roles.py": "engine/local/test_launcher.py",
    "engine/local/server_process.py": "engine/local/test_launcher.py",
    "engine/local/sharded_parameters.py": "contract/test_shards.py",
    "engine/local/shared_memory.py": "transport/test_memory.py",
    "engine/local/single.py": "cli/test_run.py",
    "engine/local/split_worker.py": "engine/local/test_replica_group.py",
    "engine/local/torchrun.py": "engine/local/test_rendezvous.py",
    "engine/local/verify.py": "contract/test_layouts.py",
    "engine/local/worker_process.py": "engine/local/test_launcher.py",
    "engine/ray/actor.py": "engine/ray/test_launcher.py",
    "engine/run_session.py": "contract/test_locked.py",
    "engine/script.py": "test_join.py",
    "engine/script_hosts.py": "test_join.py",
    "engine/signals.py": "engine/test_session.py",
    "engine/sim/script_thread.py": "engine/sim/test_scripts.py",
    "engine/sim/state.py": "engine/sim/test_network_simulation.py",
    "engine/spawn.py": "engine/local/test_process.py",
    "folder/disk.py": "folder/test_checkpoint.py",
    "log/records.py": "log/test_log.py",
    "model/checks.py": "config/test_trial.py",
    "model/shared_model.py": "test_join.py",
    "protocol/messages.py": "protocol/test_server.py",
    "recipes/resnet.py": "split/test_stages.py",
    "replay.py": "contract/test_replay.py",
    "report/drawing.py": "report/test_figures.py",
    "report/figures_runs.py": "report/test_figures.py",
    "report/page_tables.py": "report/test_page.py",
    "report/price.py": "report/test_figures.py",
    "report/summary.py": "report/test_tables.py",
    "rules/constraint.py": "contract/test_constraints.py",
    "split/one_process.py": "split/test_tensor_shards.py",
    "split/part.py": "split/test_async_pipeline.py",
    "split/plan/blocks.py": "split/plan/test_resolve.py",
    "split/plan/costs.py": "split/plan/test_explain.py",
    "split/plan/cut.py": "split/plan/test_resolve.py",
    "split/script_replica.py": "contract/test_layouts.py",
    "split/tensor_parallel.py": "contract/test_layout_tensor.py",
    "store/worker_held.py": "contract/test_allreduce.py",
    "studies/common.py": "studies/test_studies.py",
    "studies/diloco.py": "studies/test_studies.py",
    "studies/sync_switch.py": "studies/test_studies.py",
    "track/tracker.py": "track/test_services.py",
    "transport/allreduce_client.py": "contract/test_allreduce.py",
    "transport/cargo.py": "transport/test_tcp_port.py",
    "watch/feed.py": "watch/test_serve.py",
    "watch/picture.py": "watch/test_state.py",
}


def about(test: str, module: str) -> bool:
    """Whether a test's name is that of a module, alone or with a topic behind it."""
    return test == f"test_{module}" or test.startswith(f"test_{module}_")


def names(package: Path) -> set[str]:
    """The modules of a package, and the package itself."""
    return {path.stem for path in package.glob("*.py")} | {package.name}


def misplaced(tests: list[Path]) -> list[Path]:
    """Test files that have no module of their name in the same place of the package."""
    found = []
    for path in tests:
        if path.parts[0] in WHOLE or str(path) in WHOLES:
            continue
        if not any(about(path.stem, name) for name in names(PACKAGE / path.parent)):
            found.append(path)
    return found


def untested(modules: list[Path]) -> list[Path]:
    """Longer modules without a test file of their name."""
    found = []
    for path in modules:
        tests = [test.stem for test in (TESTS / path.parent).glob("test_*.py")]
        long = len((PACKAGE / path).read_text().splitlines()) > SHORT
        if long and not any(about(test, path.stem) for test in tests):
            found.append(path)
    return found


def test_every_test_lies_beside_its_module() -> None:
    tests = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py"))]
    assert not misplaced(tests), "name it after the module it tests, with a topic behind if need be"
    assert not [name for name in WHOLES if not (TESTS / name).is_file()]


def test_every_longer_module_has_its_test() -> None:
    modules = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    without = {str(path) for path in untested(modules) if path.name != "__init__.py"}
    assert not without - set(ELSEWHERE), "write its test, or say where it is tested"
    assert not set(ELSEWHERE) - without, "it has a test of its own, is short or is gone"
    assert not [test for test in ELSEWHERE.values() if not (TESTS / test).is_file()]


def test_a_name_that_is_no_modules_is_seen() -> None:
    paths = ["store/test_board.py", "store/test_board_rests.py", "store/test_boards.py"]
    assert misplaced([Path(path) for path in paths]) == [Path("store/test_boards.py")]
