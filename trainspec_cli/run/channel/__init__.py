"""The one channel between the supervisor of a run, the agents of its nodes and its workers.

Agents and workers connect to the supervisor's hub (`run/backend/hub.py`), prove that they know the job's secret, and
exchange typed messages (`messages.py`): over a Unix socket where all of them are on one node, else over TCP.

    agent -> hub      who it is, what its node can do, how processes ended, beats
    hub -> agent      start, stop or kill a group; end; beats
    worker -> hub     confirmed speeds of ranks and links; memory that ran out, which goes on to the other workers
    hub -> worker     another layout, a deeper look, how many replica groups are expected

What goes elsewhere, and why:

    rendezvous server  torch's store and the quorum of replica groups: a process of its own, since it has to answer
                       within milliseconds while the supervisor may be busy, and since groups outlive its restart
    signals            SIGTERM reaches a worker that has not connected yet, and is all that the guard has, which stops
                       the workers of a supervisor that was killed; SIGKILL and SIGUSR2 reach one that hangs
    the run folder     what must outlive the processes, or be known to one that nobody reaches: events, checkpoints,
                       errors, faults that were injected, directives; `generations/`, by which a node that was cut off
                       learns that a newer start owns the run; `stops/`, which the guard writes too; `result.json`,
                       whose presence ends the agents of a run that is over; `pid.json`, whose lock is the claim
"""
