"""The single channel between a run's supervisor, its nodes' agents and its workers.

Agents and workers connect to the supervisor's hub (`run/backend/hub.py`), prove that they know the job's secret, and
exchange typed messages (`messages.py`): over a Unix socket if all of them are on one node, otherwise over TCP.

    agent -> hub      its identity, what its node can do, how processes ended, heartbeats
    hub -> agent      start, stop or kill a group; end; heartbeats
    worker -> hub     confirmed speeds of ranks and links; out-of-memory failures, which the hub forwards to the others
    hub -> worker     a new layout, a request for a profile, the number of replica groups to expect

What does not use the channel, and why:

    rendezvous server  torch's store and the quorum of replica groups: a separate process, because it has to answer
                       within milliseconds while the supervisor may be busy, and because groups outlive its restart
    signals            SIGTERM reaches a worker that has not connected yet, and the guard, which stops the workers of a
                       killed supervisor, has no other means; SIGKILL and SIGUSR2 reach a worker that hangs
    folder servers     files of nodes that share no disk (`folders.py`): they are large, and one must be served before
                       the hub of the first start exists
    the run folder     what must outlive the processes, or reach one without a connection: events, checkpoints, errors,
                       injected faults, directives; `generations/`, from which a disconnected node learns that a newer
                       start owns the run; `stops/`, which the guard also writes; `result.json`, whose presence tells
                       the agents of a finished run to exit; `pid.json`, whose lock claims the run
"""
