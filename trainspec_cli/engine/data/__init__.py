"""Load batches: from token shards or samples to tensors on the device."""
