"""What a run would cost before it is started: python -m qurl_ray.planning --help, and docs/planning.md.

    shapes, machines   what is known of models and GPUs, and the model's few constants
    workload           what is asked of them
    roofline, memory   seconds of one decode step or pass; what fits
    phases             seconds of rollouts, learning and sync
    plan, advice       the best layout of each format, and whether quantization pays
    published          the same formulas against figures that others measured
    measure            constants of the machine at hand, instead of a data sheet's

All but `measure` is pure: it imports qurl_ray.config and qurl_ray.errors alone.
"""
