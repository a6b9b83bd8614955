"""Names of environment variables, of trainspec's processes and of the user, and the process title of a worker."""

CACHE = "TRAINSPEC_CACHE"
"""Set by users: the folder for prepared data and measured figures."""

PROBE = "TRAINSPEC_PROBE"
"""Set by users: `off` prevents measuring this machine after a run. A sweep sets it for its runs, and measures once at
its end."""

HUB_MIRROR = "TRAINSPEC_HUB_MIRROR"
"""Set by users: a folder that holds checkpoints of the Hugging Face Hub as ORG/NAME."""

RUN, STATUS, MESSAGE = "TRAINSPEC_RUN", "TRAINSPEC_STATUS", "TRAINSPEC_MESSAGE"
"""Variables for the command of `--notify`: the run folder, its end (done, stopped or failed), and a line of text."""

DEVICE = "TRAINSPEC_DEVICE"
"""The name of a device that a wing provides (`engine.accelerators.DEVICES`): workers use it instead of the plan's
device."""
EMULATED = "TRAINSPEC_EMULATED"
"""The settings of the emulated device, such as `order=7,memory_gib=2` (`wings.emulated`)."""

LAUNCH_ID = "TRAINSPEC_LAUNCH_ID"
"""The start that a process belongs to; it identifies all processes of a job."""
GENERATION = "TRAINSPEC_GENERATION"
"""The number of that start among all starts of the run. A worker of an older start stops writing."""
GROUP = "TRAINSPEC_GROUP"
"""The number of a worker's replica group, from 0."""
START = "TRAINSPEC_START"
"""The number of that group's start, from 1."""

PROGRESS = "TRAINSPEC_PROGRESS"
"""The start, and the folder where the processes of a user's command count their steps, as ID:FOLDER."""

OWN_PATH, OWN_SAFE_PATH = "TRAINSPEC_OWN_PYTHONPATH", "TRAINSPEC_OWN_PYTHONSAFEPATH"
"""In a Slurm job, PYTHONPATH and PYTHONSAFEPATH for the user's command; trainspec's own processes use other values."""

SECRET_FILE = "TRAINSPEC_SECRET_FILE"
"""The file with the secret of the job's processes; the secret itself is not in any environment."""
SUPERVISOR = "TRAINSPEC_SUPERVISOR"
"""Address of the supervisor: HOST:PORT, or the path of a Unix socket on this node."""
RENDEZVOUS = "TRAINSPEC_RENDEZVOUS"
"""Address of the job's rendezvous server, as HOST:PORT."""
STORE_FILE = "TRAINSPEC_STORE_FILE"
"""The file through which the processes of one node find each other."""

RANK = "RANK"
"""A worker's rank as set by torchrun. A forked worker has it too, but the system shows its parent's environment."""
_TITLE = "rank "


def rank_title(rank: str) -> str:
    """Return the process name of a forked worker, as `ps` and `top` show it."""
    return f"{_TITLE}{rank}"


def titled_rank(name: str) -> str | None:
    """Return the rank of a process with this name; None if it is not a forked worker."""
    return name.removeprefix(_TITLE) if name.startswith(_TITLE) else None
