"""From token shards to tensors on the device."""
