"""Create a run folder, and record what is started in it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shlex
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainspec_cli import __version__
from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.node import PRIVATE_FOLDER, check_folder, private_files
from trainspec_cli.core.reading.files import VERSION_LINE, parse_json, read_object, read_text, unreadable
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.kernels import KernelTable
from trainspec_cli.recipe.records import ABSENT, Absent, digest, read_record, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend import processes
from trainspec_cli.run.folder import memory
from trainspec_cli.run.folder.files import write_json, write_text, write_versioned
from trainspec_cli.run.folder.known_runs import remember_run
from trainspec_cli.run.folder.own_code import keep_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import Resume, RunRecord, read_run_record, write_plan, write_run_record
from trainspec_cli.run.job.job import Job, git_state, render_command, versions
from trainspec_cli.run.job.machine import write_communication
from trainspec_cli.run.slurm import commands as slurm

RUNS = Path("runs")

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True)
class LaunchOrigin:
    """The recipe and the command line that define a run."""

    recipe: str
    argv: Sequence[str]
    """The command line, without the name of the program."""
    composed_yaml: str


def check_free(run_dir: str, named_by: str = "run.dir") -> None:
    """Check a folder without creating it. Raises RecipeError if it is in use, and MachineError if other users could
    write to it. `named_by`: the key or option that specifies it."""
    root = Path(run_dir)
    if run_dir == AUTO or not root.exists():
        return
    hint = f"choose another {named_by}, or omit it"
    check_folder(root, hint)
    check_no_run(root, named_by)
    if not root.is_dir() or any(root.iterdir()):
        raise RecipeError(Problem("run_exists", f"{root} exists and is not an empty folder", named_by, hint))


def check_no_run(root: Path, named_by: str = "run.dir") -> None:
    """Raise RecipeError if the folder contains a run."""
    if RunDir(root).run_json.exists():
        run = RunDir(root)
        hint = f"continue it: trainspec resume {shlex.quote(str(root))}; or choose another {named_by}"
        if run.job_sbatch.is_file():
            hint = f"continue it: sbatch {shlex.quote(str(run.job_sbatch))}; or choose another {named_by}"
        raise RecipeError(Problem("run_exists", f"{root} already holds a run", named_by, hint))


def make_folder(run_dir: str, recipe: str, named_by: str = "run.dir") -> Path:
    """Create the named folder, or a new one below ./runs; new folders are private to this user. Raises the same errors
    as `check_free`."""
    if run_dir != AUTO:
        check_free(run_dir, named_by)
        Path(run_dir).mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        return Path(run_dir)
    parent = RUNS / re.sub(r"[^\w.-]+", "_", recipe)
    parent.mkdir(parents=True, exist_ok=True)
    usual = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        candidate = parent / (usual if number == 1 else f"{usual}-{number}")
        # Two launches within the same second get different folders, because creating the same folder fails for all but
        # the first.
        with suppress(FileExistsError):
            candidate.mkdir(PRIVATE_FOLDER)
            return candidate
    raise AssertionError("itertools.count never ends")


def write_launch(
    job: Job, plan: Plan, origin: LaunchOrigin, data_folder: Path | None, kernels: KernelTable | None = None
) -> None:
    """Write the files that the workers need, and those for reproducing the run. run.json is written last, and makes the
    folder a run. Call this while the run is claimed. Raises RecipeError if another launch has created a run here
    first."""
    run = job.run
    # Check again now that the run is claimed, because two launches into the same folder both pass the first check.
    check_no_run(run.root)
    write_text(run.composed_yaml, VERSION_LINE + origin.composed_yaml)
    write_json(run.versions_json, versions())
    # Copy the additional files that an export needs, because the originals may be deleted.
    from trainspec_cli.data.corpus.chat import keep_template
    from trainspec_cli.data.huggingface.folder import CHAT_TEMPLATE, SMALL_FILES

    init = plan.spec.init
    source = init.hugging_face or init.other or (init.run and RunDir(init.run).huggingface)
    if source is not None and source.is_dir():
        run.huggingface.mkdir(exist_ok=True)
        for name in SMALL_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, run.huggingface / name)
    if plan.spec.data.chat_template is not None:
        run.huggingface.mkdir(exist_ok=True)
        (run.huggingface / CHAT_TEMPLATE).unlink(missing_ok=True)
        keep_template(plan.spec.data, run.huggingface)
    _write_start(job, plan, kernels)
    record = RunRecord(
        recipe=origin.recipe,
        digest=digest(plan.spec),
        argv=tuple(origin.argv),
        trainspec=__version__,
        created_at=time.time(),
        data_dir=str(data_folder.absolute()) if data_folder else None,
        git=git_state(Path.cwd()),
        memory_secret=memory.new_secret(),
    )
    write_run_record(run, record)
    remember_run(run, plan.spec.run.name)


def clear_end(run: RunDir) -> None:
    """Remove the records of how the last start ended."""
    for report in run.errors_folder.glob("*.json"):
        report.unlink()
    run.result_json.unlink(missing_ok=True)


def write_resume(
    job: Job,
    plan: Plan,
    argv: Sequence[str],
    from_step: int | None,
    kernels: KernelTable | None = None,
    data_folder: Path | None = None,
) -> None:
    """Record that the run continues under `plan`, and remove the records of how the last start ended. `from_step`: None
    for a run that was recorded but never started. `data_folder`: the new folder, if the data has changed."""
    run = job.run
    record = read_run_record(run)
    if from_step is not None:
        resume = Resume(tuple(argv), __version__, time.time(), from_step)
        record = replace(record, resumes=(*record.resumes, resume))
    secret = memory.new_secret() if isinstance(record.memory_secret, Absent) else record.memory_secret
    record = replace(record, digest=digest(plan.spec), memory_secret=secret)
    if data_folder is not None:
        record = replace(record, data_dir=str(data_folder.absolute()))
    clear_end(run)
    _write_start(job, plan, kernels)
    write_run_record(run, record)


def _write_start(job: Job, plan: Plan, kernels: KernelTable | None) -> None:
    """Write the files that a start needs. `kernels`: new measurements; None keeps those of an earlier start."""
    if kernels is not None:
        write_versioned(job.run.kernels_json, to_plain(kernels))
    write_plan(job.run, plan)
    keep_code(plan.spec, job.run)
    write_communication(plan, job.run)
    job.run.plan_of_all_nodes.unlink(missing_ok=True)
    write_text(job.run.command_txt, render_command(job.command, job.environment, Path.cwd()))


def write_other_nodes(run: RunDir, plan: Plan) -> None:
    """Write the plan for the next start, on another number of nodes. The original plan is kept for a later resume."""
    if not run.plan_of_all_nodes.exists():
        write_text(run.plan_of_all_nodes, read_text(run.plan_json))
    write_plan(run, plan)


@contextmanager
def storage(run_dir: str, named_by: str = "run.dir") -> Iterator[None]:
    """Use this around all writes to a run folder. Files are private to this user, and an OSError becomes a MachineError
    that names the file or the folder. `named_by`: as for `check_free`."""
    try:
        with private_files():
            yield
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        place = error.filename or (RUNS if run_dir == AUTO else run_dir)
        hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check its owner and mode"
        problem = Problem(
            code="cannot_write",
            message=f"cannot write {place}: {error.strerror}",
            path=named_by,
            hint=f"{hint}, or choose another folder with {named_by}{' ' if named_by.startswith('-') else '='}<folder>",
            environment=True,
        )
        raise MachineError(problem) from error


# The claim on a run: one supervisor at a time holds a lock on pid.json, which is released when its process exits.


_CANNOT_BE_LOOKED_AT = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)
"""Errors that mean that no run is alive here: the file is missing, not accessible to this user, or a link, which
trainspec never creates."""
GLANCE_S = 0.5
"""`is_running` holds the lock briefly, so a claim retries for this many seconds."""
BEAT_S = 1.0
"""Interval at which the owner of the claim touches its file. Other nodes see by it that the owner is alive, even if the
file system does not show them its lock."""
CLOCK_ERROR_S = 2.0
"""Tolerance in seconds when a process's start time is compared with the time of a file."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """pid.json: the launch that holds the claim on the run."""

    pid: int = 0
    host: str = ""
    launch_id: str
    slurm_job_id: str | Absent | None = ABSENT
    """The Slurm job that the launch runs in, if any."""


@contextmanager
def claim(run: RunDir, launch_id: str) -> Iterator[None]:
    """Hold the claim on the run during the block. Raises RecipeError if another launch holds it, or if that launch's
    workers are still alive. The file is written in place, because the lock belongs to the file, not to its name."""
    # Slurm restarts a job only after its previous start has ended. Processes that survive on a disconnected node are
    # fenced off, so no check for them is needed.
    with suppress(FileNotFoundError, ValueError):
        held_by = read_object(run.pid_json).get("slurm_job_id")
        if held_by and held_by == os.environ.get("SLURM_JOB_ID"):
            run.pid_json.unlink()
    # The flags ensure that a link to a file outside the run is not followed, and that opening a pipe does not block.
    descriptor = os.open(run.pid_json, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not (
            _lock_within_glance(descriptor) and _is_same_file(descriptor, run.pid_json) and not _orphans(descriptor)
        ):
            hint = "wait for it, or stop it with Ctrl-C where it runs (`trainspec runs` shows it)"
            raise RecipeError(Problem("still_running", f"the run in {run.root} is still running", hint=hint))
        job_id = os.environ.get("SLURM_JOB_ID") or ABSENT
        owner = Owner(pid=os.getpid(), host=socket.gethostname(), launch_id=launch_id, slurm_job_id=job_id)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json_text(to_plain(owner), indent=None).encode(), 0)
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                with suppress(OSError):
                    os.utime(descriptor)

        beating = threading.Thread(target=beat, name="claim", daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join(BEAT_S)
            # Slurm has restarted the job, whose new supervisor has replaced the file: keep it.
            if _is_same_file(descriptor, run.pid_json):
                run.pid_json.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ClaimSigns:
    """What the claim's file shows to other nodes."""

    is_locked: bool
    beat_ns: int
    """The time of the owner's last sign of life, by the file server's clock."""


def read_claim(run: RunDir) -> ClaimSigns | None:
    """Return the signs; None if no launch has claimed the run. Opening the file makes NFS ask its server."""
    try:
        descriptor = os.open(run.pid_json, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _CANNOT_BE_LOOKED_AT:
            raise unreadable(run.pid_json, f"cannot be opened: {error.strerror}") from error
        return None
    try:
        # A shared lock, so that nodes that look at the same time do not take one another for the owner.
        is_locked = not _lock(descriptor, fcntl.LOCK_SH)
        return ClaimSigns(is_locked, os.fstat(descriptor).st_mtime_ns)
    finally:
        os.close(descriptor)


def drop_claim(run: RunDir) -> None:
    """Let another launch claim the run although the owner's lock has not been released: a file server may keep the lock
    of a node that is off for minutes. If the owner is alive after all, it is fenced off."""
    run.pid_json.unlink(missing_ok=True)


def find_owner(run: RunDir) -> Owner | None:
    """Return the launch whose supervisor holds the claim; None if no launch does or if that is unknown."""
    try:
        descriptor = os.open(run.pid_json, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if _lock_within_glance(descriptor):
            return None
        owner = _read(descriptor)
        if owner is None or owner.host != socket.gethostname():
            return owner
        # The file may be from an earlier launch, whose process id may have been reused.
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(owner.pid).create_time() <= os.fstat(descriptor).st_mtime + CLOCK_ERROR_S:
                return owner
        return None
    finally:
        os.close(descriptor)


def is_running(run: RunDir) -> bool:
    """Return True if a supervisor holds the claim or orphaned workers are alive; False if that is unknown."""
    try:
        # NFS refuses an exclusive lock on a file that is open for reading only.
        mode = os.O_RDWR if os.access(run.pid_json, os.W_OK) else os.O_RDONLY
        descriptor = os.open(run.pid_json, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _CANNOT_BE_LOOKED_AT:
            raise unreadable(run.pid_json, f"cannot be opened: {error.strerror}") from error
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise unreadable(run.pid_json, "is not a regular file", "remove it: no launch has written it")
        if not _lock(descriptor):
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # the search takes so long that another process would see a running run
        return _orphans(descriptor)
    finally:
        os.close(descriptor)


def _lock_within_glance(descriptor: int) -> bool:
    """Acquire the lock, even if another process briefly holds it to check whether it is free."""
    deadline = time.monotonic() + GLANCE_S
    while not _lock(descriptor):
        if time.monotonic() > deadline:
            return False
        time.sleep(GLANCE_S / 10)
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    return path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _orphans(descriptor: int) -> bool:
    owner = _read(descriptor)
    if not owner:
        return False
    job_id = owner.slurm_job_id
    in_slurm = isinstance(job_id, str) and job_id != os.environ.get("SLURM_JOB_ID") and slurm.is_alive(job_id)
    return in_slurm or bool(processes.members(owner.launch_id))


def _read(descriptor: int) -> Owner | None:
    """Return the recorded owner; None for an incomplete line or other content."""
    try:
        plain = parse_json(os.pread(descriptor, 4096, 0))
        return read_record(Owner, plain) if isinstance(plain, dict) else None
    except ValueError:  # the content is not JSON, or not a record of this kind
        return None
