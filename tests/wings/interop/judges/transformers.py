"""What transformers' own parser reads in a Trainer's arguments, as JSON and as a command line."""

import json
import sys

from transformers import HfArgumentParser, TrainingArguments


def look_up(arguments, key):
    value = arguments
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    value = getattr(value, "value", value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def judge(case):
    given = {**json.loads(case["files"]["training_args.json"]), **case["about"]}
    try:
        (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(given)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = {}
    for key in case["keys"]:
        try:
            found[key] = look_up(arguments, key)
        except (AttributeError, KeyError):
            continue
    return {"error": None, "keys": found}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)]))
