"""JAX on two processes: jax_workers.py STEPS [SECONDS], started twice by workers.py, with a checkpoint every step.

ATTACH=1 counts steps with trainspec's one line. PLACE=ends exits with 3 after 10 steps; PLACE=skip makes another
exchange on worker 1 from step 6 on.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
WORKER, PORT = int(os.environ["WORKER"]), os.environ["PORTS"].split(",")[0]
CHECKPOINT = Path("checkpoint.npz")

jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=WORKER)
everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
differentiate = jax.jit(jax.value_and_grad(lambda w, x: jnp.square(x @ w).mean()))
weights, first = np.eye(8, dtype=np.float32), 0
if CHECKPOINT.exists():
    state = np.load(CHECKPOINT)
    weights, first = state["weights"], int(state["step"])
random = np.random.default_rng(WORKER)
if job := os.environ.get("ATTACH"):
    from trainspec_cli import attach

    job = attach()
    job.begin(first)
for step in range(first, STEPS):
    batch = jax.make_array_from_process_local_data(everywhere, random.normal(size=(4, 8)).astype(np.float32))
    loss, gradient = differentiate(weights, batch)
    weights = np.asarray(weights - 0.1 * gradient)
    time.sleep(SECONDS)
    if WORKER == 0:
        np.savez("new.npz", weights=weights, step=step + 1)
        Path("new.npz").rename(CHECKPOINT)
    if job and job.step_done(loss=loss):
        print(f"worker {WORKER} ends after step {job.step}")
        break
    if os.environ.get("PLACE") == "ends" and step == 9:
        os._exit(3)
    if os.environ.get("PLACE") == "skip" and step >= 5 and WORKER == 1:
        multihost_utils.sync_global_devices("evaluated")
jax.distributed.shutdown()
