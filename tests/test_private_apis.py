"""Private parts of torch, hydra, omegaconf, typer and transformers that the package uses, by name and with the files
that use them.

A new release may rename any of them without notice: the table fails here, by name, and not somewhere in a run. A use
that is not in the table fails too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent.parent / "trainspec_cli"
LIBRARIES = {"torch", "hydra", "omegaconf", "typer"}
ATEN = "torch.ops.aten"
FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"

PARTS: dict[str, str] = {
    "torch.Tensor._base": "engine/tools/trace.py",
    "torch.UntypedStorage._cdata": "engine/tools/trace.py",
    "torch._C": (
        "engine/observe/watch.py wings/emulated/engine/allocation_log.py wings/emulated/engine/device.py "
        "wings/emulated/engine/costs.py wings/emulated/engine/exchanges.py wings/own_script/hook/sitecustomize.py"
    ),
    "torch._C._DisableTorchDispatch": "wings/emulated/engine/device.py wings/emulated/engine/costs.py",
    "torch._C._disabled_torch_function_impl": "wings/emulated/engine/device.py",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "wings/emulated/engine/device.py",
    "torch._C._autograd": "wings/emulated/engine/allocation_log.py",
    "torch._C._autograd._get_sequence_nr": "wings/emulated/engine/allocation_log.py",
    "torch._C._current_autograd_node": "wings/emulated/engine/allocation_log.py",
    "torch.autograd.graph.Node._sequence_nr": "wings/emulated/engine/allocation_log.py",
    "torch._C._distributed_c10d": (
        "engine/observe/watch.py wings/emulated/engine/exchanges.py wings/own_script/hook/sitecustomize.py"
    ),
    "torch._C._distributed_c10d.FakeWork": "engine/tools/trace.py",
    "torch._C._distributed_c10d._dump_fr_trace_json": (
        "engine/observe/watch.py wings/own_script/hook/sitecustomize.py"
    ),
    "torch._C._distributed_c10d._register_process_group": "wings/emulated/engine/exchanges.py",
    "torch._C._distributed_c10d._unregister_process_group": "wings/emulated/engine/exchanges.py",
    "torch.distributed.ProcessGroup._get_backend": "wings/emulated/engine/exchanges.py",
    "torch.distributed.ProcessGroup._register_backend": "wings/emulated/engine/exchanges.py",
    "torch.distributed.ProcessGroup._set_group_name": "wings/emulated/engine/exchanges.py",
    "torch.distributed.distributed_c10d._resolve_process_group": "wings/emulated/engine/exchanges.py",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._all_gather_result": (
        "engine/parallel/data_parallel.py"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._post_reduce_event": (
        "engine/parallel/data_parallel.py"
    ),
    "torch._dynamo": "engine/kernels/adamw.py",
    "torch._dynamo.utils.disable_cache_limit": "engine/kernels/adamw.py",
    "torch.Tensor._make_wrapper_subclass": "wings/emulated/engine/device.py",
    "torch._fused_sdp_choice": "wings/emulated/engine/device.py",
    "torch._C._FunctionBase._sequence_nr": "engine/comm/exchange.py",
    "torch._C._FunctionBase._set_sequence_nr": "engine/parallel/context.py",
    "torch._ops.OpOverload._schema": (
        "wings/emulated/engine/costs.py wings/emulated/engine/device.py wings/emulated/engine/exchanges.py "
        "wings/emulated/engine/host.py"
    ),
    "torch.ops._c10d_functional": "wings/emulated/engine/exchanges.py",
    "torch.utils._device._device_constructors": "wings/emulated/engine/device.py",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": "wings/emulated/engine/device.py",
    "torch._foreach_copy_": "wings/emulated/engine/device.py",
    "torch._foreach_div_": "engine/kernels/adamw.py engine/optim/own.py",
    "torch._foreach_lerp_": "engine/models/layers.py",
    "torch._foreach_norm": "engine/optim/optimizer.py",
    "torch._ops.OpOverload._overloadpacket": "engine/tools/trace.py",
    "torch._subclasses.fake_tensor.FakeTensor": "engine/own_code.py",
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "engine/tools/count_module.py engine/tools/kernels.py engine/tools/trace.py"
    ),
    "torch.autograd._profiler_enabled": "engine/observe/deeper_look.py",
    "torch.distributed.Backend._plugins": "engine/elastic/cross_group.py",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "engine/mesh.py",
    "torch.distributed.distributed_c10d._DistributedBackendOptions": "engine/elastic/cross_group.py",
    f"{FSDP_PARAM}._orig_size": "engine/parallel/data_parallel.py",
    f"{FSDP_PARAM}._param_fqn": "engine/parallel/data_parallel.py",
    f"{FSDP_PARAM}._unsharded_param": "engine/parallel/data_parallel.py",
    f"{FSDP_STATE}._comm_ctx": "engine/parallel/data_parallel.py",
    f"{FSDP_STATE}._fsdp_param_group": "engine/parallel/data_parallel.py",
    f"{FSDP_STATE}._root_post_backward_final_callback": "engine/parallel/data_parallel.py",
    "torch.nn.Module._parameters": "engine/parallel/pipeline.py",
    f"{ATEN}._grouped_mm": "engine/parallel/expert.py",
    f"{ATEN}._to_copy": "engine/tools/trace.py",
    f"{ATEN}._scaled_mm": "engine/parallel/expert.py",
    f"{ATEN}._scaled_dot_product_cudnn_attention": "engine/parallel/expert.py",
    f"{ATEN}._scaled_dot_product_efficient_attention": "engine/parallel/context.py engine/parallel/expert.py",
    f"{ATEN}._scaled_dot_product_efficient_attention_backward": "engine/parallel/context.py",
    f"{ATEN}._scaled_dot_product_flash_attention": "engine/parallel/context.py engine/parallel/expert.py",
    f"{ATEN}._scaled_dot_product_flash_attention_backward": "engine/parallel/context.py",
    f"{ATEN}._scaled_dot_product_flash_attention_for_cpu": (
        "engine/parallel/context.py engine/parallel/expert.py engine/tools/trace.py wings/emulated/engine/device.py"
    ),
    f"{ATEN}._scaled_dot_product_flash_attention_for_cpu_backward": (
        "engine/parallel/context.py engine/tools/trace.py wings/emulated/engine/device.py"
    ),
    f"{ATEN}._scaled_dot_product_fused_attention_overrideable": (
        "engine/parallel/expert.py wings/emulated/engine/device.py"
    ),
    "torch.testing._internal.distributed.fake_pg.FakeStore": "engine/tools/trace.py",
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "engine/parallel/expert.py engine/tools/trace.py wings/emulated/engine/host.py"
    ),
    "torch.utils._pytree.tree_iter": "engine/tools/trace.py",
    "torch.utils._pytree.tree_leaves": (
        "wings/emulated/engine/costs.py wings/emulated/engine/device.py wings/emulated/engine/exchanges.py "
        "wings/emulated/engine/host.py"
    ),
    "torch.utils._pytree.tree_map": (
        "wings/emulated/engine/device.py wings/emulated/engine/exchanges.py wings/emulated/engine/host.py"
    ),
    "torch.utils._pytree.tree_map_only": "engine/parallel/expert.py",
    "torch.nn.Module._apply": "engine/models/transformers_module.py",
    "transformers.PreTrainedModel._init_weights": "engine/models/transformers_module.py",
}
"""The name -> the files that use it."""
MAY_LACK = {
    "_dump_nccl_trace": "engine/observe/watch.py wings/own_script/hook/sitecustomize.py",  # builds for GPUs have it
    "_last_post_reduce_events": "engine/parallel/data_parallel.py",  # since torch 2.13
    "_sleep": "engine/accelerators.py",
    "_fsdp_param_groups": "engine/parallel/data_parallel.py",  # torch 2.11 has one group
    "_unsharded_param": "engine/parallel/data_parallel.py",
}
"""Attributes that are read with a default; their absence is handled."""
OF_PYTHON = {"_replace", "_exit", "_current_frames", "_run_exitfuncs", "_shutdown", "_getframe", "_ParameterKind"}
"""Private by name alone (namedtuple, os), or parts of Python."""


def find(name: str) -> Any:
    """Import the object with this dotted name. Raises AttributeError, by name."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:count]))
        except ImportError:
            continue
        for word in words[count:-1]:
            found = getattr(found, word)
        return found if count == len(words) else attribute(found, words[-1])
    raise AttributeError(name)


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a class or module; of a class also one that its instances alone have, by its source."""
    if hasattr(owner, name):
        return getattr(owner, name)
    if inspect.isclass(owner) and f"self.{name}" in inspect.getsource(owner):
        return name
    if inspect.isclass(owner) and name in inspect.get_annotations(owner):
        return name
    raise AttributeError(f"{owner} has no {name}")


@pytest.mark.parametrize("name", PARTS)
def test_a_private_part_is_there(name: str) -> None:
    assert find(name) is not None


def test_every_private_part_is_in_the_table_with_the_files_that_use_it() -> None:
    listed = {(name.rpartition(".")[2], file) for name, files in PARTS.items() for file in files.split()}
    listed |= {(name, file) for name, files in MAY_LACK.items() for file in files.split()}
    used = {(name, file) for file in files_of_package() for name in private_uses(file)}
    assert sorted(used - listed) == [], "used, and not in the table"
    for name, file in listed - used:  # in a text, or inherited by a class of the package
        assert name in (PACKAGE / file).read_text(encoding="utf-8"), f"{file} does not use {name}"


def files_of_package() -> Iterator[str]:
    return (file.relative_to(PACKAGE).as_posix() for file in sorted(PACKAGE.rglob("*.py")))


def private_uses(file: str) -> set[str]:
    """Return the last words of private names of the libraries that a file imports, and the private attributes that it
    reads from objects of classes that are not its own."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    if not re.search(r"""[.'"]_[a-z]""", text):
        return set()
    imported, read, own = set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [f"{above}{alias.name}" for alias in node.names]
            private = [name for name in names if "._" in name and name.split(".")[0] in LIBRARIES]
            imported.update(name.rpartition(".")[2] for name in private)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute) and not _is_own_object(node.value):
            read.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            read.update(str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant))
    private_read = {name for name in read if name.startswith("_") and not name.startswith("__")}
    return imported | (private_read - own - OF_PYTHON)


def _is_own_object(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def test_the_error_of_usage_is_reached_through_a_public_one() -> None:
    """Typer exports the errors that are raised for one parameter, and not the class above them."""
    import typer

    from trainspec_cli.cli.main import _usage_error

    assert _usage_error().__name__ == "UsageError"
    assert issubclass(typer.BadParameter, _usage_error())
