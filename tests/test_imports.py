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
    *("errors", "spelling", "choices", "discipline", "contribution"),
    *("codec", "optim", "store", "log", "board", "lease", "pace", "cluster"),
    *("watch.picture", "watch.state", "layout"),
)
NOT_PURE = ("store.checkpoint", "layout.measure", "layout.explain", "layout.settle")

# What a pure part never touches. Time is the engine's, which may well simulate it.
MACHINERY = (
    *("threading", "_thread", "queue", "concurrent", "asyncio"),
    *("multiprocessing", "subprocess", "signal", "os.fork", "torch.multiprocessing"),
    *("socket", "select", "selectors", "ray", "torch.distributed"),
    *("time", "datetime"),
)
# What runs the pure parts, and so is never imported by them; the bare package is all of it.
DOWNSTREAM = ("engine", "link", "replay", "train", "join", "report", "cli", "")

# What each module may import from offbeat besides itself, in the order of the path of a gradient.
# Every module is covered; one that shows or starts runs (cli, demo, studies) may use them all.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "signals": {"errors"},
    "chance": set(),
    "spelling": {"errors"},
    "limits": set(),
    "task": {"errors"},
    "recipes": {"errors", "spelling", "task"},
    "choices": {"errors", "spelling"},
    "discipline": {"errors", "spelling", "choices"},
    "codec": {"errors", "spelling"},
    "optim": {"errors", "spelling"},
    "board": {"errors", "choices", "discipline"},
    "lease": {"errors"},
    "data": {"chance", "errors", "lease"},
    "store.disk": {"errors"},
    "store.lock": {"errors", "store.disk"},
    "store.manifest": {"errors", "store.disk"},
    "store.tensors": {"errors", "store.disk"},
    "logfile": {"errors", "store.disk"},
    "log": {"errors", "lease", "logfile"},
    "store": set(),
    "store.table": {"errors"},
    "store.digest": {"store.table"},
    "store.averages": {"errors", "store.table"},
    "contribution": {"codec", "log", "store.table"},
    "replica": set(),
    "replica.soundness": {"errors"},
    "replica.shared": set(),
    "replica.objective": {"errors", "lease", "data", "replica.soundness"},
    "replica.stream": {"store.table"},
    "replica.whole": {
        *("errors", "lease", "data", "store.table"),
        *("replica.objective", "replica.shared", "replica.stream"),
    },
    "replica.evaluate": {"errors", "data", "task", "replica.objective"},
    "replica.scale": {"errors"},
    "replica.trained": {"errors"},
    "replica.passes": {"layout.tree", "replica.scale"},
    "replica.tensor": {"layout.shards", "link.peers"},
    "replica.part": {
        "chance",
        *("lease", "data", "link.mesh", "link.peers"),
        *("replica.objective", "replica.passes", "replica.scale", "replica.tensor"),
        *("layout.cut", "layout.schedule", "layout.stages", "layout.tree"),
    },
    "replica.flow": {"lease", "store.table", "replica.part", "replica.passes"},
    "replica.turns": {
        "chance",
        *("errors", "lease", "link.mesh", "link.peers", "replica.part", "replica.tensor"),
        *("layout.copies", "layout.cut", "layout.shards", "layout.stages", "layout.tree"),
    },
    "replica.split": {
        *("lease", "store.table", "replica.part", "replica.stream", "replica.whole"),
        "layout.shards",
    },
    "replica.open": {
        *("lease", "layout.schedule", "layout.tree", "store.table"),
        *("replica.part", "replica.passes", "replica.split", "replica.whole"),
    },
    "replica.front": {
        "chance",
        *("errors", "lease", "layout.tree"),
        *("replica.open", "replica.part", "replica.passes"),
    },
    "store.joint": {"optim", "store.table"},
    "store.schedule": {"errors"},
    "store.constraint": {"errors", "spelling"},
    "store.updater": {
        "store.schedule",
        *("errors", "choices", "discipline", "optim", "task", "store.table", "store.joint"),
        "store.constraint",
    },
    "store.weigh": {"choices", "store.table"},
    "store.parameters": {
        *("choices", "contribution", "store.averages", "store.digest", "store.table"),
        *("store.updater", "store.weigh"),
    },
    "store.home": {"errors", "store.table", "store.updater"},
    "store.mirror": {
        *("contribution", "store.digest", "store.home", "store.parameters", "store.table"),
    },
    "store.replicas": {
        *("choices", "contribution", "data"),
        *("store.digest", "store.parameters", "store.table", "store.updater"),
    },
    "store.core": {
        *("choices", "discipline", "board", "lease", "log", "contribution"),
        *("store.table", "store.parameters"),
    },
    "store.fold": {"board", "lease", "log", "store.core"},
    "store.checkpoint": {
        *("errors", "log", "logfile"),
        *("store.disk", "store.lock", "store.manifest", "store.tensors"),
    },
    "send": {
        *("errors", "choices", "discipline", "lease", "data", "codec", "contribution"),
        *("replica.whole", "store.table", "store.updater"),
    },
    "worker": {
        *("errors", "choices", "discipline", "lease", "log", "contribution", "send"),
        "store.table",
    },
    "job": {
        "board",
        *("errors", "choices", "discipline", "lease", "data", "codec", "log", "send", "worker"),
        *("replica.objective", "replica.shared", "replica.whole", "replica.part"),
        *("replica.split", "replica.open", "replica.turns"),
        *("layout.cut", "link.mesh"),
        *("store.table", "store.updater", "store.parameters", "store.replicas", "store.core"),
        "store.weigh",
    },
    "replica.last": {
        *("errors", "job", "lease", "layout.copies", "replica.objective", "replica.part"),
    },
    "pace": {"errors", "spelling"},
    "layout": set(),
    "layout.value": {"errors", "spelling"},
    "layout.tree": {"errors"},
    "layout.copies": {"chance"},
    "layout.blocks": {"errors", "spelling"},
    "layout.stages": {"errors", "layout.blocks", "layout.copies", "layout.tree"},
    "layout.shards": {"errors", "spelling"},
    "layout.cut": {"layout.blocks", "layout.shards", "layout.stages", "layout.value"},
    "layout.settle": {"errors", "choices", "discipline", "layout"},
    "layout.costs": set(),
    "layout.partition": {"errors"},
    "layout.schedule": set(),
    "layout.plan": {
        *("errors", "layout.value", "layout.blocks", "layout.costs"),
        *("layout.partition", "layout.schedule"),
    },
    "layout.measure": {
        *("errors", "layout.blocks", "layout.costs", "layout.shards", "layout.stages"),
        *("layout.copies", "layout.tree"),
    },
    "layout.explain": {
        *("errors", "pace", "layout.value", "layout.blocks", "layout.costs", "layout.plan"),
        *("layout.measure", "layout.shards", "layout.stages", "layout.tree"),
    },
    "cluster": {"errors", "spelling", "pace"},
    "link": set(),
    "link.base": {"lease", "contribution"},
    "link.messages": {"lease", "link.cores", "log"},
    "link.signs": {"board"},
    "link.memory": {
        *("link.cores", "errors", "limits", "board", "store.home", "store.table", "link.posts"),
        "link.signs",
    },
    "link.keys": set(),
    "link.group": {"link.keys", "store.table"},
    "link.meeting": {
        *("contribution", "log", "replica.stream", "link", "store.parameters", "store.table"),
    },
    "link.shared": {"lease", "contribution", "link"},
    "link.mesh": {"errors"},
    "link.posts": {"board", "link.mesh"},
    "link.cores": {"board"},
    "link.peers": {"chance", "link.mesh"},
    "prefetch": {"chance", "data", "errors", "lease"},
    "loop": {"errors", "lease", "contribution", "worker", "link.base"},
    "engine": set(),
    "engine.process": {"errors", "signals"},
    "engine.blame": {"errors", "engine"},
    "engine.image": {
        *("contribution", "log", "job", "link.memory", "store.parameters", "store.table"),
    },
    "engine.orders": set(),
    "engine.answers": set(),
    "engine.server": {
        *("errors", "board", "lease", "contribution", "link", "engine.answers"),
        *("store.core", "store.parameters", "store.table"),
    },
    "engine.ears": {"board", "link.cores"},
    "engine.floor": {"engine.ears", "engine.server"},
    "engine.bench": {"layout.shards", "link.memory", "replica.split", "send", "store.table"},
    "engine.rounds": {
        *("errors", "board", "contribution", "link", "engine.server"),
        *("store.core", "store.mirror", "store.parameters", "store.table"),
    },
    "engine.via": {
        *("errors", "choices", "contribution", "job", "log", "send", "worker", "store.table"),
        "link.meeting",
    },
    "engine.team": {
        *("errors", "contribution", "lease", "send", "store.table", "link", "replica.split"),
        *("engine.process", "engine.bench"),
        *("replica.open", "engine.process"),
    },
    "engine.flow": {
        *("contribution", "lease", "loop", "send", "worker", "store.table", "link"),
        *("replica.flow", "engine.team", "engine.bench"),
    },
    "engine.verify": {
        *("errors", "discipline", "job", "lease", "layout.copies", "layout.cut", "link.memory"),
        *("replica.objective", "store.table", "engine", "signals"),
    },
    "engine.split": {
        *("choices", "job", "send", "worker", "store.core", "layout.cut", "link"),
        *("replica.flow", "replica.part", "replica.passes", "replica.split", "engine"),
    },
    "engine.hand": {
        *("contribution", "log", "link.memory", "link.messages"),
        *("store.checkpoint", "store.parameters", "store.weigh"),
    },
    "engine.spread": {
        *("choices", "contribution", "job", "link.memory", "link.messages", "engine"),
        *("store.digest", "store.parameters", "store.table"),
    },
    "engine.keep": {"link.memory", "store.checkpoint"},
    "engine.open_team": {
        *("contribution", "job", "worker", "store.core", "link.mesh", "engine"),
        *("replica.open", "replica.part", "replica.passes"),
    },
    "engine.watchdog": {"link.signs"},
    "engine.steward": {"log", "link.memory", "link.signs", "store", "engine"},
    "engine.local_plan": {
        *("errors", "choices", "job", "link.memory", "prefetch", "store.table", "engine.via"),
    },
    "engine.crew": {
        *("errors", "choices", "pace", "log", "send", "worker", "job", "prefetch", "loop"),
        *("link", "engine", "replica.evaluate"),
        "store",
    },
    "engine.local": {
        *("errors", "log", "kept", "run", "report.summary", "link.cores", "engine", "signals"),
        "link.signs",
    },
    "engine.outcome": {
        *("errors", "job", "kept", "run", "report.summary", "report.split"),
        *("engine.crew", "engine.orders"),
    },
    "engine.station": {
        *("choices", "discipline", "job", "worker", "prefetch", "loop", "link", "engine.flow"),
    },
    "engine.local_script": {
        *("errors", "log", "job", "worker", "loop", "kept", "run", "script"),
        *("link", "report.summary", "store.core", "engine", "signals"),
    },
    "engine.private": {"errors"},
    "engine.door": {"errors", "engine.private"},
    "engine.torchrun": {
        *("errors", "job", "kept", "script", "setup", "report.summary", "engine", "signals"),
        *("link.base", "link.memory"),
    },
    "link.direct": {"errors", "lease", "contribution", "link.base", "store.core"},
    "script": {
        "store.schedule",
        "chance",
        *("errors", "discipline", "codec", "data", "lease", "log", "task", "job", "setup"),
        *("worker", "loop", "link.base", "store.table", "store.updater", "store.core"),
        *("layout.value", "replica.front", "replica.open", "replica.soundness", "store.constraint"),
    },
    "kept": {
        *("discipline", "errors", "job", "log", "logfile", "run", "setup"),
        *("report.summary", "report.split", "signals"),
        *("store.checkpoint", "store.core", "store.disk", "store.lock", "store.parameters"),
        *("store.table", "store.tensors"),
    },
    "engine.alone": {
        *("choices", "lease", "log", "job", "worker", "loop", "run", "session", "script", "kept"),
        *("link", "report.summary", "store.table", "signals"),
    },
    "engine.player": {
        *("chance", "errors", "data", "lease", "script", "worker", "replica.front"),
    },
    "engine.sim_script": {
        "chance",
        *("errors", "choices", "cluster", "data", "lease", "log", "job", "worker", "send", "run"),
        *("session", "setup", "replay", "script", "kept", "report.summary"),
        *("store.core", "store.checkpoint", "engine.sim", "engine.sim_state", "engine.player"),
    },
    "hosts": {"errors", "log", "run", "script", "engine"},
    "join": {
        "store.schedule",
        *("errors", "given", "discipline", "codec", "data", "lease", "log", "task", "run"),
        *("script", "engine", "store.table", "store.updater", "layout.value", "replica.front"),
        *("hosts", "store.constraint", "replica.trained"),
    },
    "engine.sim": {
        *("errors", "choices", "pace", "cluster", "contribution", "job", "lease", "send", "worker"),
        "store.core",
    },
    "engine.sim_state": {
        *("lease", "log", "contribution", "session", "engine.sim", "store.table", "signals"),
    },
    "report": set(),
    "report.words": set(),
    "report.score": {"errors"},
    "report.summary": {"log", "report.score", "report.words"},
    "report.split": {"layout.cut", "report.summary"},
    "report.timeline": {"lease", "log"},
    "report.recount": {"lease"},
    "report.digest": {
        *("errors", "log", "logfile", "report.score", "report.summary", "report.timeline"),
        "report.recount",
        "store.checkpoint",
    },
    "report.tables": {"report.summary", "report.words"},
    "report.screen": set(),
    "report.live": {"board", "log", "report.screen", "report.tables"},
    "track": {"errors", "log", "report.summary"},
    "watch": {"errors", "log", "lease"},
    "report.grid": {"errors", "report.digest", "report.score", "report.summary", "report.words"},
    "report.price": {"report.grid", "report.score", "report.tables"},
    "report.verdict": {"report.grid", "report.price", "report.tables"},
    "report.drawing": {"errors"},
    "report.figures_runs": {
        *("report.digest", "report.drawing", "report.grid", "report.score", "report.tables"),
    },
    "report.figures_one": {
        *("report.digest", "report.drawing", "report.figures_runs", "report.grid"),
        "report.tables",
    },
    "report.figures": {
        *("report.drawing", "report.figures_one", "report.figures_runs", "report.grid"),
        *("report.score", "report.tables"),
    },
    "report.markup": set(),
    "report.page_tables": {
        *("report.drawing", "report.figures_runs", "report.grid", "report.markup"),
        *("report.score", "report.summary", "report.tables"),
    },
    "report.page": {
        *("errors", "report.drawing", "report.figures", "report.grid", "report.markup"),
        *("report.page_tables", "report.verdict"),
    },
    "run": {"report", "signals"},
    "length": {"choices", "job"},
    "given": {"errors", "spelling", "choices", "codec", "store.schedule", "store.updater"},
    "setup": {
        *("length", "store.checkpoint", "store.schedule"),
        *("errors", "spelling", "given", "choices", "discipline", "task", "data", "codec", "optim"),
        *("replica", "send", "job", "store.table", "store.updater", "layout", "trial"),
        "store.constraint",
    },
    "trial": {"errors", "data", "replica.objective", "engine.blame", "engine.process", "signals"},
    "session": {
        *("chance", "job", "log", "replica.evaluate", "store.core", "store.checkpoint", "signals"),
    },
    "replay": {
        *("choices", "send"),
        *("errors", "task", "lease", "log", "contribution", "worker", "job", "setup", "session"),
        *("replica.objective", "replica.shared", "store.table", "store.checkpoint"),
    },
    "train": {
        *("errors", "given", "choices", "discipline", "task", "cluster", "pace", "log"),
        *("job", "setup", "session", "send", "run", "kept"),
        *("replica.objective", "replica.evaluate", "report.score", "report.summary", "engine"),
        *("store.checkpoint", "watch", "layout.value"),
    },
    "compare": {
        *("errors", "spelling", "choices", "discipline", "task", "pace", "cluster", "log"),
        *("setup", "train", "report", "store.checkpoint", "layout"),
        *("replica.shared", "replica.evaluate"),
    },
    "doctor": {"report.tables", "signals", "store.checkpoint"},
    "cost": {
        *("errors", "choices", "discipline", "cluster", "log", "send", "job", "engine.sim"),
        "report.summary",
    },
}
FREE = ("", "__main__", "cli", "demo", "studies")

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
    downstream = {m for m in own_imports(path) if within(m, DOWNSTREAM)}
    assert not downstream, f"{named(path)} is pure; these run it, so they import it"


@every_module
def test_layers(path: Path) -> None:
    name = module_name(path)
    # The longest entry that covers a module speaks for it.
    entry = max((known for known in LAYERS if within(name, (known,))), key=len, default=None)
    if entry is None:
        free = within(name, FREE[1:]) or name == FREE[0]
        assert free, f"{named(path)} is not in the table of allowed imports: put it there"
        return
    extra = {m for m in own_imports(path) if not within(m, {entry, *LAYERS[entry]})}
    assert not extra, f"{named(path)} may import {sorted(LAYERS[entry])} of offbeat"


def test_layers_have_no_cycles() -> None:
    below: set[str] = set()
    waiting = dict(LAYERS)
    while ready := {name for name, allowed in waiting.items() if allowed <= below}:
        below |= ready
        waiting = {name: allowed for name, allowed in waiting.items() if name not in ready}
    assert not waiting


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
