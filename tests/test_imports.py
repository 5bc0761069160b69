"""The shape of the package: what each part may import, how a module opens, how long it may be."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "offbeat"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 500

# The pure parts: they compute, and leave clocks, threads, processes and transports to an engine.
# A name stands for a module or for a whole package.
PURE = (
    *("errors", "discipline", "codec", "optim", "rules", "protocol", "log.records", "store"),
    *("config.checks", "config.text", "config.units", "data.lease", "data.reader"),
    *("worker.contribution", "worker.send", "worker.worker", "split.plan", "split.layout"),
    *("engine.sim.cluster", "engine.sim.compute_times", "engine.sim.tables", "engine.sim.faults"),
    *("engine.sim.hosts", "engine.sim.network", "watch.picture", "watch.state"),
)
NOT_PURE = ("split.plan.measure", "split.plan.explain", "split.plan.resolve")
# These know no tensors either: who says what, and who may go on.
WITHOUT_TENSORS = ("discipline", "protocol", "data.lease", "log.records", "store.board")

# What a pure part never touches. Time is the engine's, which may well simulate it.
MACHINERY = (
    *("threading", "_thread", "queue", "concurrent", "asyncio"),
    *("multiprocessing", "subprocess", "signal", "os.fork", "torch.multiprocessing"),
    *("socket", "select", "selectors", "ray", "torch.distributed"),
    *("time", "datetime"),
)

# The packages in the order in which a gradient meets them. A module may import its own package and
# what stands above it, and nothing below. A name of two words is one module that stands apart from
# its package, because others need it sooner or it needs others later.
ORDER = (
    *("errors", "config.text", "config.checks", "config.units", "config.limits", "config.task"),
    *("discipline", "optim", "codec", "folder", "data", "log", "folder.checkpoint"),
    *("folder.script_state",),
    *("model", "rules", "split", "worker.contribution"),
    *("protocol", "transport.link", "worker", "store.board", "store", "transport"),
    *("report", "engine.signals", "engine.spawn", "engine.local.process"),
    *("engine.sim.compute_times", "engine.sim.tables", "engine.sim.faults", "engine.sim.hosts"),
    *("engine.sim.cluster",),
    *("config", "engine", "watch", "track", "replay", "loop", "join", "train", ""),
    *("recipes", "compare", "studies", "cli", "__main__"),
)
# Imports that go against that order, each with its reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("engine.sim.scripts", "replay"): "a script's log is replayed with its threads",
}

# Ways of reading bytes that can run code. Run folders and peers are not trusted with that.
CODE_FROM_BYTES = (
    *("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    *("torch.load", "torch.save", "torch.serialization", "torch.package"),
)


def within(name: str, roots: tuple[str, ...] | set[str]) -> bool:
    """True when the dotted `name` is one of `roots` or lies below one."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def module_name(path: Path) -> str:
    """The dotted name of a file of the package without its first word: `store.flat`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Every import as (name it binds, dotted name it means); `package` resolves relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of attributes that begins with a plain name, otherwise nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def used(source: str, package: str = "offbeat") -> set[str]:
    """Every dotted name a source imports or reaches through an import (`t.load` is torch.load)."""
    tree = ast.parse(source)
    bindings = list(imported(tree, package))
    # `import a.b` binds `a`; only `as` binds the whole.
    meaning = {bound: name for bound, name in bindings if "." not in bound}
    meaning |= {bound.split(".")[0]: bound.split(".")[0] for bound, _ in bindings if "." in bound}
    names = {name for _, name in bindings}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted(node)):
            first, _, rest = chain.partition(".")
            if first in meaning:
                names.add(f"{meaning[first]}.{rest}")
    return names


def used_by(path: Path) -> set[str]:
    return used(path.read_text(), package_of(path))


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT).parts)


def own_imports(path: Path) -> set[str]:
    """The modules of offbeat that a file imports, without their first word; "" is the package."""
    found = set()
    for _, name in imported(ast.parse(path.read_text()), package_of(path)):
        if within(name, ("offbeat",)):
            # The last word of `from offbeat.board import may_go` is no module: cut until one fits.
            parts = name.split(".")
            while len(parts) > 1 and not is_module(parts):
                parts.pop()
            found.add(".".join(parts[1:]))
    return found


def is_module(parts: list[str]) -> bool:
    path = ROOT.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def pure_modules() -> list[Path]:
    names = {path: module_name(path) for path in MODULES}
    return [p for p, name in names.items() if within(name, PURE) and not within(name, NOT_PURE)]


def loads_pickled_arrays(source: str) -> bool:
    """True when some call says `allow_pickle=` anything but a plain False."""
    return any(
        isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        for node in ast.walk(ast.parse(source))
    )


def sentences(paragraph: str) -> int:
    """Full stops that end something: at the very end, or before a word that begins anew."""
    return len(re.findall(r"[.!?][)\]\"'`”’]*(?=\s+[^\sa-z]|\s*$)", paragraph))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_module = pytest.mark.parametrize("path", MODULES, ids=named)


@pytest.mark.parametrize("path", pure_modules(), ids=named)
def test_pure_parts_leave_machinery_to_the_engine(path: Path) -> None:
    touched = {name for name in used_by(path) if within(name, MACHINERY)}
    assert not touched, f"{named(path)} is pure; move what needs these into an engine"


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_who_may_go_on_is_decided_without_tensors(path: Path) -> None:
    if within(module_name(path), WITHOUT_TENSORS):
        assert "torch" not in {name.split(".")[0] for name in used_by(path)}


def stands(name: str) -> int:
    """Where in the order a module stands: the longest entry that covers it counts."""
    found = [entry for entry in ORDER if entry and within(name, (entry,))]
    if name == "":
        return ORDER.index("")
    assert found, f"{name} is not in the order of the packages: put it there"
    return ORDER.index(max(found, key=len))


@every_module
def test_modules_import_only_what_a_gradient_has_met_before(path: Path) -> None:
    name = module_name(path)
    below = {m for m in own_imports(path) if stands(m) > stands(name)}
    below -= {m for m in below if (name, m) in EXCEPTIONS}
    assert not below, f"{named(path)} stands above these; move one of them, or what is used"


def test_exceptions_are_needed_and_have_a_reason() -> None:
    imports = {module_name(path): own_imports(path) for path in MODULES}
    for (name, other), reason in EXCEPTIONS.items():
        assert other in imports[name], f"{name} no longer imports {other}: take the exception out"
        assert stands(other) > stands(name)
        assert reason


def test_no_module_imports_itself_by_a_detour() -> None:
    names = {module_name(path) for path in MODULES}
    waiting = {module_name(p): own_imports(p) & names - {module_name(p), ""} for p in MODULES}
    below: set[str] = set()
    while ready := {name for name, needs in waiting.items() if needs <= below}:
        below |= ready
        waiting = {name: needs for name, needs in waiting.items() if name not in ready}
    assert not waiting, f"these import each other: {sorted(waiting)}"


@every_module
def test_no_module_runs_code_from_bytes(path: Path) -> None:
    found = {name for name in used_by(path) if within(name, CODE_FROM_BYTES)}
    assert not found, "use safetensors for tensors and msgspec for records"
    assert not loads_pickled_arrays(path.read_text()), "use allow_pickle=False"


@every_module
def test_modules_open_with_one_sentence(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{named(path)} does not say what it is for"
    first = docstring.split("\n\n")[0]
    assert sentences(first) == 1, f"one sentence, with its full stop, and a blank line: {first!r}"


@every_module
def test_modules_fit_in_a_head(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST, f"{named(path)} has {lines} lines; split it by noun"


# The checks themselves, on sources that must be caught and sources that must not.


@pytest.mark.parametrize(
    "source",
    [
        "import threading",
        "def f():\n    import time",
        "import multiprocessing.shared_memory as shm",
        "from concurrent.futures import Future",
        "from torch import distributed",
        "import torch.distributed as dist",
        "import torch\ntorch.distributed.barrier()",
        "import torch as t\nt.multiprocessing.Queue()",
        "import os\nos.fork()",
    ],
)
def test_machinery_is_seen(source: str) -> None:
    assert any(within(name, MACHINERY) for name in used(source))


@pytest.mark.parametrize(
    "source", ["import torch", "from timeit import timeit", "clock.time()", "'import time'"]
)
def test_what_only_looks_like_machinery_is_allowed(source: str) -> None:
    assert not any(within(name, MACHINERY) for name in used(source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "import torch as t\nt.load(path)",
        "import torch.nn\ntorch.save(x, path)",
    ],
)
def test_code_from_bytes_is_seen(source: str) -> None:
    assert any(within(name, CODE_FROM_BYTES) for name in used(source))


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("np.load(p, allow_pickle=True)", True),
        ("np.load(p, allow_pickle=chosen)", True),
        ("np.load(p, allow_pickle=False)", False),
        ("np.load(p)", False),
    ],
)
def test_pickled_arrays_are_seen(source: str, seen: bool) -> None:
    assert loads_pickled_arrays(source) is seen


@pytest.mark.parametrize(
    ("source", "package", "meant"),
    [
        ("from . import flat", "offbeat.store", "offbeat.store.flat"),
        ("from ..errors import RunError", "offbeat.store", "offbeat.errors.RunError"),
        ("from .errors import RunError", "offbeat", "offbeat.errors.RunError"),
    ],
)
def test_relative_imports_are_resolved(source: str, package: str, meant: str) -> None:
    assert meant in used(source, package)


@pytest.mark.parametrize(
    ("paragraph", "count"),
    [
        ("No end", 0),
        ("What it is for.", 1),
        ("Versions 1.5 to 2.0, i.e. the old ones.", 1),
        ("First. Second.", 2),
        ("First (so). `second` too.", 2),
    ],
)
def test_sentences_are_counted(paragraph: str, count: int) -> None:
    assert sentences(paragraph) == count
