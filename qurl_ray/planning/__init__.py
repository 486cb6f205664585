"""Memory and speed of a run before it starts, in two parts.

What fits, which a run itself asks before it loads anything (training.rank.host_memory):

    shapes, workload   shapes of models; amount of work in one step
    machines           data sheets of GPUs, and the constants of the formulas
    memory             bytes of learner, engines and hosts in each turn, and the limits that a layout exceeds

The calculator, `qurl plan` (docs/choosing.md):

    speed, sync        seconds of rollouts, learning and turns; of a sync, by transport
    measured           figures that a GPU measured with this package, which replace formulas
    plan, report       the best layout of each format; the table, the verdict and the settings

All of it is pure: of qurl_ray it imports only planning and layer 0 (docs/design.md).
"""
