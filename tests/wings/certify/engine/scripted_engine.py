"""An engine that computes nothing: it answers with numbers of its own, or wrongly in the manner that it is told.

python scripted_engine.py MANNER REQUEST
"""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

manner, request_file = sys.argv[1], Path(sys.argv[2])
request, folder = json.loads(request_file.read_text()), request_file.parent
answer: dict = {"schema": "trainspec.engine/1"}
weights = load_file(Path(request["model"]) / "model.safetensors")
if manner == "asleep":
    time.sleep(60)
if manner == "fails":
    sys.exit("no such layout")
if manner == "declines" or (manner == "alone" and request["processes"] > 1):
    answer["declined"] = "it has one process"
else:
    steps = request["steps"] - request["first_step"]
    answer["losses"] = [5.0 + request["first_step"] + step for step in range(steps)]
    for asked in ("gradients", "weights"):
        tensors = {name: np.full_like(values, 0.5) for name, values in weights.items()}
        name = next(iter(tensors))
        if manner == "wrong_shape":
            tensors[name] = tensors[name].T.copy()
        if manner == "half":
            tensors[name] = tensors[name].astype(np.float16)
        if manner == "no_tensor":
            del tensors[name]
        if manner == "nan":
            tensors[name][0] = math.nan
        save_file(tensors, folder / f"{asked}.safetensors")
        answer[asked] = f"{asked}.safetensors"
    if manner == "cut":
        (folder / "gradients.safetensors").write_bytes((folder / "gradients.safetensors").read_bytes()[:-8])
    if manner == "elsewhere":
        answer["gradients"] = "../gradients.safetensors"
    if manner == "no_file":
        answer["gradients"] = "none.safetensors"
    if manner == "nan_loss":
        answer["losses"][3] = math.nan
    if manner == "few_losses":
        answer["losses"].pop()
    if manner == "text_losses":
        answer["losses"][0] = "5"
    if manner == "old":
        answer["schema"] = "trainspec.engine/0"
if request["save_to"]:
    Path(request["save_to"]).mkdir()
if manner == "garbage":
    (folder / "answer.json").write_text("{" * 9)
elif manner != "silent":
    (folder / "answer.json").write_text(json.dumps(answer))
