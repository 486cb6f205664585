"""Estimate the cost of a run before it starts: python -m qurl_ray.planning --help, and docs/choosing.md.

    shapes, machines   shapes of models, data sheets of GPUs, and the constants of the formulas
    workload           amount of work in one step
    roofline, memory   seconds of one decode step or prefill; memory of engines, learners and hosts in each turn
    phases, sync       seconds of rollouts, learning and turns; of a sync, by transport
    plan, advice       the best layout of each format, and whether quantization pays
    configured         whether a run's own layout can start
    published          the same formulas compared with published measurements
    measure            timings of this machine, instead of a data sheet

All modules but `measure` are pure: of qurl_ray they import only planning, config and errors.
"""
