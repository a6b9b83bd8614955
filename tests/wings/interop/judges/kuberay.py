"""How the API server checks a RayJob against KubeRay's schema: cases on stdin, judgements on the last line of stdout.

KUBERAY_CRD names the file of the schema. Unlike the API server, which drops unknown keys, this refuses them."""

import json
import os
import sys
from pathlib import Path

import jsonschema
import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def close(schema):
    """Refuse keys that the schema does not know."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for inner in schema.values():
            close(inner)
    elif isinstance(schema, list):
        for inner in schema:
            close(inner)


definition = yaml.load(Path(os.environ["KUBERAY_CRD"]).read_text(), LOADER)
(schema,) = (one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == "v1")
close(schema)
checker = jsonschema.Draft202012Validator(schema)


def judge(case):
    manifest = yaml.safe_load(case["files"]["rayjob.yaml"])
    errors = [f"{'.'.join(map(str, one.absolute_path))}: {one.message}" for one in checker.iter_errors(manifest)]
    if (manifest["kind"], manifest["apiVersion"]) != (definition["spec"]["names"]["kind"], "ray.io/v1"):
        errors.append("another kind")
    return {"error": "; ".join(errors) or None}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)]))
