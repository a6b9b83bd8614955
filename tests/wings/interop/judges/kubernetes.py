"""How Kubernetes' and Kubeflow's schemas read manifests: cases on stdin, judgements on the last line of stdout."""

import json
import sys

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

KUBEFLOW = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def read(manifest):
    """Return the manifest as its schema reads it. Raises the exceptions of the schema."""
    if manifest["kind"] in KUBEFLOW:
        return json.loads(KUBEFLOW[manifest["kind"]].from_dict(manifest).to_json())
    kubernetes_validate.validate(manifest, "1.36", strict=True)
    return manifest


def judge(case):
    (text,) = case["files"].values()
    try:
        found = [read(manifest) for manifest in yaml.safe_load_all(text)]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "keys": {"manifests": found}}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)]))
