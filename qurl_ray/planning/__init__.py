"""Estimate the cost of a run before it starts: python -m qurl_ray.planning --help, and docs/choosing.md.

    shapes, machines   shapes of models, data sheets of GPUs, and the constants of the formulas
    workload           amount of work in one step
    roofline, memory   seconds of one decode step or prefill; memory of engines and learners
    phases             seconds of rollouts, learning and sync
    plan, advice       the best layout of each format, and whether quantization pays
    published          the same formulas compared with published measurements
    measure            timings of this machine, instead of a data sheet

All modules but `measure` are pure: of qurl_ray they import only planning, config and errors.
"""
