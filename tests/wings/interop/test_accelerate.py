"""Accelerate's YAML, and what `accelerate launch` and its processes read in it."""

from __future__ import annotations

import pytest
import yaml
from wings.interop.emitting import Case, config_for, each_mistyped, files_in, judge

from trainspec_cli.wings.interop import nest

RUNS = (
    (),
    ("layout.zero_stage=2", "layout.tp=2", "layout.sequence_parallel=false", "recompute=full", "compile=false"),
    ("layout.dp_shard=4", "layout.dp_replicate=2", "layout.cp=2", "precision=fp32", "model=qwen3_0_6b"),
    ("model=qwen3_0_6b", "data.seq_len=1024", "layout.dp_shard=1", "layout.dp_replicate=16", "recompute=none"),
)
UNSEEN = "compute_environment"
"""Only `accelerate config` asks for it."""


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_accelerate_reads_every_key(run: tuple[str, ...]) -> None:
    keys = config_for("accelerate", *run)
    (judgement,) = judge("accelerate", [Case(files_in("accelerate", *run), list(keys))])
    assert judgement.error is None
    read = {key: str(value) for key, value in judgement.keys.items()}
    assert read == {key: str(value) for key, value in keys.items() if key != UNSEEN}


@pytest.mark.slow
def test_accelerate_notices_a_mistyped_key() -> None:
    keys = config_for("accelerate", *RUNS[1])
    wrong = each_mistyped(keys, keys)
    cases = [Case({"accelerate.yaml": yaml.safe_dump(nest(one))}, list(keys)) for one in wrong]
    (right, *judged) = judge("accelerate", [Case(files_in("accelerate", *RUNS[1]), list(keys)), *cases])
    unseen = {key for key, judgement in zip(keys, judged, strict=True) if judgement == right}
    assert unseen <= {UNSEEN, *DEFAULTS}


DEFAULTS = {
    "num_machines",
    "use_cpu",
    "distributed_type",
    "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_state_dict_type",
    "fsdp_config.fsdp_version",
    "parallelism_config.parallelism_config_dp_replicate_size",
    "parallelism_config.parallelism_config_cp_size",
}
"""Keys whose value may equal Accelerate's default."""


def test_plain_data_parallelism_needs_no_fsdp() -> None:
    keys = config_for("accelerate", *RUNS[3])
    assert keys["distributed_type"] == "MULTI_GPU"
    assert not [key for key in keys if key.startswith(("fsdp_config", "parallelism_config"))]
