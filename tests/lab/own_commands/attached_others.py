"""Training without torch: attached_others.py jax | tensorflow. It trains until it is stopped."""

import sys
import time

from trainspec_cli import attach

run = attach()
if sys.argv[1] == "jax":
    import jax
    import jax.numpy as jnp

    differentiate = jax.jit(jax.value_and_grad(lambda w: jnp.square(w - 1.0).mean()))
    weights = jnp.zeros(8)
    while True:
        loss, gradient = differentiate(weights)
        weights = weights - 0.1 * gradient
        time.sleep(0.05)
        if run.step_done(loss=loss):
            break
    jnp.save("weights.npy", weights)
else:
    import tensorflow as tf

    weights, optimizer = tf.Variable(tf.zeros(8)), tf.keras.optimizers.Adam(0.1)
    checkpoint = tf.train.Checkpoint(weights=weights, optimizer=optimizer)
    while True:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(weights - 1.0))
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        time.sleep(0.05)
        if run.step_done(loss=loss):
            break
    checkpoint.write("weights")
assert "torch" not in sys.modules
print("saved at step", run.step)
