"""What all hosts of a run have to agree on, and where two of them differ first."""

import hashlib
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from offbeat.config.describe import first_difference, sketch
from offbeat.config.run_config import RunConfig

VERSIONS = ("offbeat", "torch", "python", "instructions")


def sketch_of(config: RunConfig, script: Path | None) -> dict[str, Any]:
    """A run as its script on this host describes it, and what it would be computed with."""
    told = sketch(config)
    model, samples = told.pop("model"), told.pop("samples")
    return {
        **versions(),
        "model": model,
        "samples": samples,
        "discipline": str(config.discipline),
        "codec": None if config.codec is None else str(config.codec),
        "pull_codec": None if config.pull_codec is None else str(config.pull_codec),
        "layout": None if config.layout is None else str(config.layout),
        "via": getattr(config.engine, "via", None),
        "seed": config.seed,
        "nonfinite": config.nonfinite,
        "policies": dict(config.policies),
        **told,
        "the script": script_hash(script),
    }


def versions() -> dict[str, str]:
    """What decides how numbers come out: the same code, on processors that can do the same."""
    return {
        "offbeat": metadata.version("offbeat"),
        "torch": torch.__version__.split("+")[0],
        "python": ".".join(map(str, sys.version_info[:2])),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def script_hash(script: Path | None) -> str:
    """A script as bytes; nothing if there is none."""
    return "" if script is None else hashlib.sha256(script.read_bytes()).hexdigest()[:16]


def difference(store: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Where the description here differs from the store's, in words; nothing where it does not."""
    mine = dict(here)
    if store.get("instructions") != mine.get("instructions"):
        both = {str(store.get("instructions")), str(mine.get("instructions"))}
        if both <= {"AVX2", "AVX512"}:  # of which every operation has the same bits
            mine["instructions"] = store.get("instructions")
    return first_difference(store, mine) or ""
