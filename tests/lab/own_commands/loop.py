"""Training on one process as a user writes it: loop.py STEPS [SECONDS]. PLACE says what happens, and when."""

import os
import signal
import sys
import time

import torch

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
PLACE = os.environ.get("PLACE", "")

if PLACE == "begin":
    raise ValueError("broken from the first line on")
if PLACE == "saves":

    def save(*_: object) -> None:
        time.sleep(1.0)
        print("saved", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(STEPS):
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(SECONDS)
    if PLACE == "ends" and step == 9:
        sys.exit(3)
    if PLACE == "stands" and step == 9:
        time.sleep(3600)
    if PLACE == "evaluates" and step == 9:
        until = time.monotonic() + 12
        while time.monotonic() < until:
            sum(range(10**6))
print("trained", STEPS)
