"""Training run: a driver, the ranks of a learner, and the coordinator between them and the rollouts.

    driver/        starts everything, watches it, writes the logs    the process of the job
    rank/          learns, quantizes, sends weights                  Ray Train's workers
    coordinator/   collects rollouts, passes weights to engines      one actor

They share `messages`, the records that they exchange, `checkpoint` and `deadlines`.
"""
