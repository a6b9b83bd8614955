"""How SkyPilot reads tasks: cases on stdin, judgements on the last line of stdout."""

import json
import sys

import sky
import yaml


def judge(case):
    try:
        task = sky.Task.from_yaml_config(yaml.safe_load(case["files"]["task.yaml"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "keys": {"task": json.loads(json.dumps(task.to_yaml_config(), default=str))}}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)]))
