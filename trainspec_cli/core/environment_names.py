"""Environment variables: those by which trainspec's processes know one another, and a user's. And a worker's title."""

CACHE = "TRAINSPEC_CACHE"
"""A user's choice of the folder for prepared data and measured figures."""

PROBE = "TRAINSPEC_PROBE"
"""A user's choice, `off`, that this machine is not measured after a run. A sweep makes it for its runs: it measures at
its own end."""

HUB_MIRROR = "TRAINSPEC_HUB_MIRROR"
"""A user's folder of checkpoints of the Hugging Face Hub, as ORG/NAME below it."""

RUN, STATUS, MESSAGE = "TRAINSPEC_RUN", "TRAINSPEC_STATUS", "TRAINSPEC_MESSAGE"
"""Variables for the command of `--notify`: the run's folder, its end (done, stopped or failed), and a line of text."""

DEVICE = "TRAINSPEC_DEVICE"
"""The name of a device that a wing brings (`engine.accelerators.DEVICES`): workers use it in place of the plan's."""

LAUNCH_ID = "TRAINSPEC_LAUNCH_ID"
"""The start that a process belongs to: every process of a job is found by it."""
GENERATION = "TRAINSPEC_GENERATION"
"""The number of that start among all of the run's: a worker of an older one writes no more."""
GROUP = "TRAINSPEC_GROUP"
"""The number of a worker's replica group, from 0."""
START = "TRAINSPEC_START"
"""The number of that group's start, from 1."""

PROGRESS = "TRAINSPEC_PROGRESS"
"""The start, and the folder in which the processes of a command of the user's own count their steps, as ID:FOLDER."""

OWN_PATH, OWN_SAFE_PATH = "TRAINSPEC_OWN_PYTHONPATH", "TRAINSPEC_OWN_PYTHONSAFEPATH"
"""In a Slurm job, PYTHONPATH and PYTHONSAFEPATH as a command of the user's own is to have them: trainspec's own
processes have others."""

SECRET_FILE = "TRAINSPEC_SECRET_FILE"
"""The file that holds the secret of the job's processes; the secret itself stands in no environment."""
SUPERVISOR = "TRAINSPEC_SUPERVISOR"
"""Where the supervisor hears its workers: HOST:PORT, or the path of a Unix socket on this node."""
RENDEZVOUS = "TRAINSPEC_RENDEZVOUS"
"""The address at which the job's rendezvous server listens, as HOST:PORT."""
STORE_FILE = "TRAINSPEC_STORE_FILE"
"""The file in which the processes of one node meet."""

RANK = "RANK"
"""torchrun's, of a worker; a forked worker has it, but the system shows the environment of the process it came from."""
_TITLE = "rank "


def rank_title(rank: str) -> str:
    """Return the name that a forked worker bears, as `ps` and `top` show it."""
    return f"{_TITLE}{rank}"


def titled_rank(name: str) -> str | None:
    """Return the rank that a process of this name has; None where it is no forked worker."""
    return name.removeprefix(_TITLE) if name.startswith(_TITLE) else None
