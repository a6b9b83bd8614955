"""Fails on rank 1 before the first step, while the others wait."""

import os
import time

if os.environ["RANK"] == "1":
    raise ValueError("broken on rank 1")
time.sleep(3600)
