"""TensorFlow's MultiWorkerMirroredStrategy on two processes: tensorflow_workers.py STEPS [SECONDS], started twice by
workers.py, with a checkpoint every step.

ATTACH=1 counts steps with trainspec's one line. PLACE=ends exits with 3 after 10 steps; PLACE=skip leaves out all
exchanges on worker 1 from step 7 on (TensorFlow itself ends where workers make different ones).
"""

import json
import os
import sys
import time

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
WORKER = int(os.environ["WORKER"])
cluster = {"worker": [f"127.0.0.1:{port}" for port in os.environ["PORTS"].split(",")]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": WORKER}})

import tensorflow as tf  # noqa: E402 - it reads TF_CONFIG

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = tf.Variable(tf.eye(8))
    made = tf.Variable(0, dtype=tf.int64, trainable=False)
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.build([weights])
manager = tf.train.CheckpointManager(
    tf.train.Checkpoint(weights=weights, made=made, optimizer=optimizer),
    "checkpoints" if WORKER == 0 else f"checkpoints_of_{WORKER}",
    max_to_keep=2,
)
if newest := tf.train.latest_checkpoint("checkpoints"):
    manager.checkpoint.restore(newest)
first = int(made.numpy())


@tf.function
def train_step(batch: tf.Tensor) -> tf.Tensor:
    def of_replica(own: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(own @ weights))
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(of_replica, args=(batch,)), axis=None)


if job := os.environ.get("ATTACH"):
    from trainspec_cli import attach

    job = attach()
    job.begin(first)
for step in range(first, STEPS):
    loss = train_step(tf.random.normal((4, 8)))
    made.assign(step + 1)
    time.sleep(SECONDS)
    manager.save()
    if job and job.step_done(loss=loss):
        print(f"worker {WORKER} ends after step {job.step}")
        break
    if os.environ.get("PLACE") == "ends" and step == 9:
        os._exit(3)
    if os.environ.get("PLACE") == "skip" and step >= 5 and WORKER == 1:
        time.sleep(3600)
