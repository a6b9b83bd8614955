"""An engine that computes nothing: it answers with prepared tensors, or makes the mistake that MANNER names.
It uses only the standard library, so that it starts fast.

python scripted_engine.py MANNER TENSORS REQUEST
"""

import json
import math
import shutil
import sys
import time
from pathlib import Path

manner, tensors, request_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
request, folder = json.loads(request_file.read_text()), request_file.parent
answer: dict = {"schema": "trainspec.engine/1"}
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
        answer[asked] = f"{asked}.safetensors"
        shutil.copy(tensors, folder / answer[asked])
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
