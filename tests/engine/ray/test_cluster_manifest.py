"""The manifest for KubeRay in docs/ray.md: its fields are of a RayJob, its command is ours."""

import copy
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from offbeat.cli import app
from offbeat.cli.options import counts
from tests.test_docs import blocks

DOCS = Path(__file__).resolve().parents[3] / "docs"


def fields(needed: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": needed | others,
        "required": [*needed],
        "additionalProperties": False,
    }


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


# As much of ray.io/v1 (RayJob) and of a pod's template as a manifest like ours may use.
WORD, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
WORDS = {"type": "object", "additionalProperties": WORD}
QUANTITIES = {
    "type": "object",
    "propertyNames": {"pattern": "^(cpu|memory|nvidia.com/gpu)$"},
    "additionalProperties": {"type": "string", "pattern": "^[0-9]+(m|[KMGT]i?)?$"},
}
CONTAINER = fields(
    {"name": WORD, "image": WORD},
    {
        "env": listed(fields({"name": WORD, "value": WORD}, {})),
        "resources": fields({}, {"requests": QUANTITIES, "limits": QUANTITIES}),
        "volumeMounts": listed(fields({"name": WORD, "mountPath": WORD}, {"readOnly": FLAG})),
    },
)
CLAIM = fields({"claimName": WORD}, {"readOnly": FLAG})
VOLUME = fields({"name": WORD, "persistentVolumeClaim": CLAIM}, {})
POD = fields({"containers": listed(CONTAINER)}, {"volumes": listed(VOLUME)})
GROUP = {"rayStartParams": WORDS, "template": fields({"spec": POD}, {"metadata": WORDS})}
RANGE = {"groupName": WORD, "minReplicas": COUNT, "maxReplicas": COUNT}
CLUSTER = fields(
    {"headGroupSpec": fields(GROUP, {"serviceType": WORD})},
    {
        "workerGroupSpecs": listed(fields(GROUP | RANGE, {"replicas": COUNT})),
        "rayVersion": WORD,
        "enableInTreeAutoscaling": FLAG,
    },
)
JOB = fields(
    {"entrypoint": WORD, "rayClusterSpec": CLUSTER},
    {
        **{"shutdownAfterJobFinishes": FLAG, "ttlSecondsAfterFinished": COUNT},
        **{"entrypointNumCpus": {"type": "number"}, "entrypointResources": WORD},
        **{"submissionMode": WORD, "runtimeEnvYAML": WORD, "backoffLimit": COUNT},
    },
)
RAY_JOB = fields(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": fields({"name": {"pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}}, {}),
        "spec": JOB,
    },
    {},
)


@pytest.fixture
def manifest() -> Any:
    page = (DOCS / "ray.md").read_text()
    (shown,) = [block.text for block in blocks(page) if block.language == "yaml"]
    return yaml.safe_load(shown)


def test_it_has_the_fields_that_kuberay_has_and_requires(manifest: Any) -> None:
    jsonschema.validate(manifest, RAY_JOB)
    for path in (("rayClusterSpec", "headGroupSpec", "template"), ("rayClusterSpec",)):
        broken = copy.deepcopy(manifest)
        part = broken["spec"]
        for name in path[:-1]:
            part = part[name]
        part[f"{path[-1]}s"] = part.pop(path[-1])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, RAY_JOB)


def test_its_command_is_one_of_ours_and_has_the_room_that_it_asks_for(manifest: Any) -> None:
    program, name, *words = shlex.split(manifest["spec"]["entrypoint"])
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    asked = command.make_context(program, words).params
    assert (program, name, asked["engine"].value) == ("offbeat", "run", "ray")
    cluster = manifest["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    each = int(group["rayStartParams"]["num-cpus"])
    assert counts(asked["workers"]) == (each * group["minReplicas"], each * group["maxReplicas"])
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert cluster["enableInTreeAutoscaling"]
    # What is kept lies on a volume of the host that the store is on.
    head = cluster["headGroupSpec"]["template"]["spec"]
    (mount,) = head["containers"][0]["volumeMounts"]
    assert PurePosixPath(asked["out"]).is_relative_to(mount["mountPath"])
    assert mount["name"] in [volume["name"] for volume in head["volumes"]]
