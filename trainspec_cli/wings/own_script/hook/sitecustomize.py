"""Count the optimizer steps of a program started by `trainspec run`, without changing the program.

Python imports a module with this name at startup, and `trainspec run` puts this folder on PYTHONPATH. The module
removes the folder from `sys.path`, waits until torch's optimizers and torch.distributed are imported, and runs the
user's sitecustomize. It uses only the standard library, because it runs in the user's Python (3.9 or later), where
trainspec need not be installed. It prints nothing and ignores its own errors, because it must not affect the program.

After its first optimizer step, a process has a 4096-byte file FOLDER/PID-TIME.steps: a 64-byte `HEADER`, then `SLOTS`
records of format `SLOT`. Step number N is in record N % SLOTS. Each step is written with one 16-byte `pwrite`. On a
full disk the write fails, whereas a memory-mapped page would end the process with SIGBUS. SIGUSR2 appends the stacks of
all threads to FOLDER/PID-TIME.stacks, unless the program handles that signal itself.

After `torch.distributed.init_process_group`, a process has a pipe FOLDER/PID.ask. Whoever opens and closes the pipe for
writing makes a thread write torch's flight recorder to FOLDER/PID.collectives: the process's newest collectives. Until
then, the thread sleeps."""

import os
import sys
import types

LAUNCH_ID = "TRAINSPEC_LAUNCH_ID"
PROGRESS = "TRAINSPEC_PROGRESS"
MAGIC = b"TSSTEPS1"
MAGIC_ATTACHED = b"TSSTEPS2"
"""The magic number in files of programs that report their steps and write the events themselves."""
HEADER = "<8sIiIIqdQ"
"""MAGIC, process id, rank (-1: none), world size (0: none), 1 if SIGUSR2 writes stacks, the update count of the
optimizer's state before this process's first step (-1: unknown), Unix time, and the main thread's id."""
HEADER_BYTES = 64
SLOT = "<Qd"
"""The number of a step in this process (from 1), and the step's Unix time."""
SLOT_BYTES = 16
SLOTS = 252
OPTIMIZERS = "torch.optim.optimizer"
MODULES = "torch.nn.modules.module"
DISTRIBUTED = "torch.distributed.distributed_c10d"
STATE_MAKER = "_init_optim_state"
"""A torch.distributed.checkpoint function that takes a step only to create the optimizer's state."""


class StepCount(types.ModuleType):
    """Counts a step when its attribute `stepped` is set.

    It is a `ModuleType` because code compiled by torch sets module attributes after the graph has run,
    without reading them. A compiled `optimizer.step()` is therefore counted without a graph break, a guard or a
    warning."""

    def __setattr__(self, name, optimizer):
        try:
            _count_step(optimizer)
        except Exception:
            _state.update(pid=os.getpid(), file=None)


_state = {"pid": 0, "file": None, "magic": MAGIC, "ranks": None, "known": set(), "registered": False, "restored": False}
"""pid: the process that counts steps; a forked process starts a new count. file: descriptor of the process's file; None
if it has no file or a write failed. ranks: the process's rank and world size, if the program has reported them. known:
optimizers that have taken a step. registered: whether the SIGUSR2 handler is this module's. restored: whether a model
or an optimizer has loaded a state."""
_count = StepCount("trainspec_steps")


def _stepped(optimizer, arguments, keywords):
    """Called by torch after every step of every optimizer."""
    _count.stepped = optimizer


def _count_step(optimizer):
    """Count a training step when an optimizer steps again. If every parameter has an optimizer that steps in the
    backward pass, each of them steps once per training step. In DeepSpeed's ZeRO, each parameter group in turn is
    assigned to one optimizer, which steps once for each."""
    if id(optimizer) not in _state["known"]:
        # Ignore steps outside training: torch's checkpointing takes a step without gradients to create the state that
        # it then loads.
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != STATE_MAKER:
            frame = frame.f_back
        if frame is not None:
            return
    _state["known"].add(id(optimizer))
    if _state["pid"] != os.getpid():
        # An optimizer without a counter (SGD) starts at 0. If a state was loaded, its number of steps is unknown.
        updates = 0
        try:
            step = next((state.get("step", 0) for state in optimizer.state.values()), 0)
            if not (getattr(step, "is_cuda", False) and sys.modules["torch"].cuda.is_current_stream_capturing()):
                updates = int(step)
        except Exception:
            pass
        _open(max(updates - 1, -1 if _state["restored"] else 0))
    if _state["file"] is None or _state["magic"] == MAGIC_ATTACHED:
        return
    round_of = _state["round"]
    key = id(optimizer), id(optimizer.param_groups[0]) if len(optimizer.param_groups) == 1 else 0
    if key not in round_of and round_of:
        round_of.add(key)
        return
    round_of.clear()
    round_of.add(key)
    _write_step()


def attach(before, rank, world_size):
    """From now on, count calls of `attached_step` instead of optimizer steps, starting after `before` steps."""
    _state.update(magic=MAGIC_ATTACHED, ranks=(rank, world_size))
    if not _folder or not os.path.isdir(_folder):
        return
    try:
        _open(before)
    except Exception:
        _state.update(pid=os.getpid(), file=None)


def attached_step():
    try:
        if _state["pid"] == os.getpid() and _state["file"] is not None:
            _write_step()
    except Exception:
        _state.update(file=None)


def _write_step():
    _state["steps"] = step = _state["steps"] + 1
    os.pwrite(_state["file"], _state["pack"](step, _state["time"]()), HEADER_BYTES + step % SLOTS * SLOT_BYTES)
    if _state["answers"] and _state["replaced"]():  # the program has installed its own handler
        _state["answers"] = 0
        _write_header()


def _open(before):
    """Create this process's file at its first step. A process that only imports torch gets no file."""
    import struct
    import threading
    import time

    _state.update(pid=os.getpid(), file=None, steps=0, round=set(), answers=0, time=time.time)
    _state["pack"] = struct.Struct(SLOT).pack
    name = os.path.join(_folder, "%d-%d" % (os.getpid(), time.time_ns()))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    _state["before"] = before
    _state["main"] = threading.main_thread().ident or 0
    _state["answers"] = _answer_signal(name + ".stacks", flags)
    file = os.open(name + ".new", flags, 0o600)
    os.pwrite(file, b"\0" * (HEADER_BYTES + SLOTS * SLOT_BYTES), 0)
    _state["file"] = file
    _write_header()
    os.rename(name + ".new", name + ".steps")


def _write_header():
    import struct

    ranks = _state["ranks"]
    if not ranks:
        # torch.distributed knows the rank and world size even if RANK is not set (Lightning). Otherwise the environment
        # may contain them.
        try:
            distributed = sys.modules["torch"].distributed
            ranks = distributed.get_rank(), distributed.get_world_size()
        except Exception:
            rank, size = (os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE"))
            ranks = int(rank) if rank.isdigit() else -1, int(size) if size.isdigit() else 0
    about = (
        os.getpid(),
        *ranks,
        _state["answers"],
        max(-1, _state["before"]),
        _state["time"](),
        _state["main"],
    )
    os.pwrite(_state["file"], struct.pack(HEADER, _state["magic"], *about), 0)


def _answer_signal(path, flags):
    """Make SIGUSR2 write the stacks of all threads; return 1 on success. If the signal already has a handler, change
    nothing."""
    try:
        import _signal
        import faulthandler

        number = _signal.SIGUSR2
        handler = _signal.getsignal(number)
        _state["replaced"] = lambda: _signal.getsignal(number) != handler
        try:
            # Python cannot see a handler in native code.
            with open("/proc/self/status") as status:
                caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
            is_native = bool(int(caught, 16) >> (number - 1) & 1) and not _state["registered"]
        except (OSError, StopIteration):
            is_native = False
        # On several nodes, agents ignore SIGUSR2, which is Slurm's warning signal. Their child processes inherit this.
        if is_native or handler not in (_signal.SIG_DFL, _signal.SIG_IGN):
            return 0
        stacks = open(os.open(path, flags | os.O_APPEND, 0o600), "wb")
        faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        _state["registered"] = True
        return 1
    except Exception:
        return 0


def _note_loads(owner):
    """Make a class record that one of its objects has loaded a state."""
    import functools

    load = getattr(owner, "load_state_dict", None)
    if load is None:
        return

    @functools.wraps(load)
    def load_state_dict(*arguments, **keywords):
        _state["restored"] = True
        return load(*arguments, **keywords)

    owner.load_state_dict = load_state_dict


def _note_optimizers(module):
    module.register_optimizer_step_post_hook(_stepped)
    _note_loads(getattr(module, "Optimizer", None))
    _note_loads(getattr(sys.modules.get(MODULES), "Module", None))


def _note_process_groups(module):
    """Let a process show its collectives once it has joined the others."""
    import functools

    join = module.init_process_group

    @functools.wraps(join)
    def init_process_group(*arguments, **keywords):
        joined = join(*arguments, **keywords)
        try:
            _show_collectives()
        except Exception:
            pass
        return joined

    module.init_process_group = init_process_group


def _show_collectives():
    """Start the thread that writes the flight recorder when asked. torch's own threads are running by now, so a fork is
    no less safe than before."""
    import threading

    name = os.path.join(_folder, str(os.getpid()))
    if os.path.exists(name + ".ask"):
        return
    os.mkfifo(name + ".new-ask", 0o600)
    os.rename(name + ".new-ask", name + ".ask")
    threading.Thread(target=_answer_asks, args=(name,), name="trainspec", daemon=True).start()


def _answer_asks(name):
    try:
        while True:
            with open(name + ".ask", "rb") as ask:  # waits for someone who asks
                ask.read()
            text = _flight_record()
            with open(name + ".new-collectives", "w") as file:
                file.write(text)
            os.rename(name + ".new-collectives", name + ".collectives")
    except Exception:
        pass


def _flight_record():
    """Return torch's flight recorder as JSON. Only NCCL's has the lines of code, because the host does not wait for
    NCCL's collectives, and looking up lines takes a second at first."""
    import json

    c10d = sys.modules["torch"]._C._distributed_c10d
    entries = []
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is not None:
        entries += json.loads(dump(True, False)).get("entries", ())
    dump = getattr(c10d, "_dump_nccl_trace", None)
    if dump is not None:
        import pickle

        entries = [one for one in entries if one["profiling_name"].startswith("gloo:")]
        entries += pickle.loads(dump(True, True, False)).get("entries", ())
    return json.dumps({"entries": entries[-NEWEST:]}, allow_nan=False)


class TorchImport:
    """A module finder that waits for the import of one of torch's modules, and changes it."""

    def find_spec(self, name, path=None, target=None):
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        try:
            if not CHANGES:
                sys.meta_path.remove(self)
            import importlib.util

            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def load_and_change(module):
                load(module)
                try:
                    change(module)
                except Exception:
                    pass

            spec.loader.exec_module = load_and_change
            return spec
        except Exception:
            return None


CHANGES = {OPTIMIZERS: _note_optimizers, DISTRIBUTED: _note_process_groups}
NEWEST = 200
"""Number of collectives to write."""


def _run_users_sitecustomize():
    """Run the user's sitecustomize, if there is one, under the name `sitecustomize`. Python reports its errors as
    usual."""
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_here = os.path.dirname(os.path.abspath(__file__))
_launch, _, _folder = os.environ.get(PROGRESS, "").partition(":")
sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _here]
sys.modules["_trainspec_steps"] = sys.modules[__name__]
if _launch and _launch == os.environ.get(LAUNCH_ID) and os.path.isdir(_folder):
    sys.meta_path.insert(0, TorchImport())
_run_users_sitecustomize()
