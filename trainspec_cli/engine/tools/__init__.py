"""Programs that run outside of training, each in a separate process: probes, traces, measurements, exports."""
