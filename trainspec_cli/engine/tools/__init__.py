"""Programs beside training, each a process of its own: probes, traces, measurements, exports."""
