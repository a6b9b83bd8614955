"""One rank of a job that sums by gloo's all-reduce again and again: `python summing.py RANK RANKS STORE BYTES`.

Rank 0 prints the machine's clock after each sum. A wrong sum ends the job.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    rank, ranks, store, message_bytes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    values = torch.empty(message_bytes // 4)
    while True:
        values.fill_(1.0)
        dist.all_reduce(values)
        assert float(values.min()) == float(values.max()) == ranks, "a sum was wrong"
        if rank == 0:
            print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
