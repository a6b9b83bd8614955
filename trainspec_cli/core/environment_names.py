"""Names of environment variables that users or trainspec's processes set, and the process title of a worker."""

CACHE = "TRAINSPEC_CACHE"
"""Set by users: the folder for prepared data and measurements."""

PROBE = "TRAINSPEC_PROBE"
"""Set by users: `off` disables the measurement of this machine after a run. A sweep sets it for its runs, and measures
the machine once at the end."""

HUB_MIRROR = "TRAINSPEC_HUB_MIRROR"
"""Set by users: a folder that contains checkpoints of the Hugging Face Hub as ORG/NAME."""

NODES_SECRET = "TRAINSPEC_NODES_SECRET"
"""Set by users on every node of a run whose nodes share no run folder: a private file with 32 random bytes, the same on
all nodes."""

RUN, STATUS, MESSAGE = "TRAINSPEC_RUN", "TRAINSPEC_STATUS", "TRAINSPEC_MESSAGE"
"""Set for the command of `--notify`: the run folder, how the run ended (done, stopped or failed), and a line of
text."""

DEVICE = "TRAINSPEC_DEVICE"
"""The name of a device provided by a plug-in (`engine.accelerators.DEVICES`), which workers use instead of the plan's
device."""
EMULATED = "TRAINSPEC_EMULATED"
"""The settings of the emulated device, such as `order=7,memory_gib=2` (`wings.emulated`)."""

LAUNCH_ID = "TRAINSPEC_LAUNCH_ID"
"""Identifies the start of the run to which a process belongs; the same for all processes of a job."""
GENERATION = "TRAINSPEC_GENERATION"
"""The number of the process's start among all starts of the run. Workers of older starts stop writing."""
NODE = "TRAINSPEC_NODE"
"""The number of a worker's node in its job."""
GROUP = "TRAINSPEC_GROUP"
"""The number of a worker's replica group, starting at 0."""
START = "TRAINSPEC_START"
"""The number of the replica group's start, starting at 1."""
MARKS = "TRAINSPEC_MARKS"
"""In the environment of a standby process: room for LAUNCH_ID and GROUP of the start that will use it."""

PROGRESS = "TRAINSPEC_PROGRESS"
"""ID:FOLDER of a user's command: the start's identifier, and the folder where the command's processes count their
steps."""

OWN_PATH, OWN_SAFE_PATH = "TRAINSPEC_OWN_PYTHONPATH", "TRAINSPEC_OWN_PYTHONSAFEPATH"
"""In a Slurm job, PYTHONPATH and PYTHONSAFEPATH for the user's command; trainspec's own processes use different
values."""

JOINS = "TRAINSPEC_JOINS"
"""NODE:GENERATION in a Slurm job that only replaces this lost node in this running start of the run."""

SECRET_FILE = "TRAINSPEC_SECRET_FILE"
"""The file with the secret that authenticates the job's processes. The secret itself is not in any environment
variable."""
SUPERVISOR = "TRAINSPEC_SUPERVISOR"
"""Address of the supervisor: HOST:PORT, or the path of a Unix socket on this node."""
RENDEZVOUS = "TRAINSPEC_RENDEZVOUS"
"""Address of the job's rendezvous server, as HOST:PORT."""
STORE_FILE = "TRAINSPEC_STORE_FILE"
"""The file that a single node's processes use for their rendezvous."""

RANK = "RANK"
"""A worker's rank, as set by torchrun. Forked workers have it too, but the system shows their parent's environment."""
_TITLE = "rank "


def rank_title(rank: str) -> str:
    """Return the process name of a forked worker, as shown by `ps` and `top`."""
    return f"{_TITLE}{rank}"


def titled_rank(name: str) -> str | None:
    """Return the rank of a process with this name; None if it is not a forked worker."""
    return name.removeprefix(_TITLE) if name.startswith(_TITLE) else None
