"""Every error that qurl_ray raises on purpose.

QurlError
├── ConfigError          a setting is missing, unknown or contradicts another   (never retried)
│   └── ExtensionError   a function that a setting names failed
├── PlacementError       the cluster can never hold what a run asks of it       (never retried)
├── DataError            a task, data set or prompt cannot be used              (never retried)
├── RewardError          a reward function cannot be used                       (never retried)
├── EnvironmentFailed    an environment cannot be used                          (never retried)
├── QuantizationError    a weight or model cannot be quantized                  (never retried)
├── CheckpointError      a checkpoint is damaged or not this run's              (never loaded)
├── SyncError            weights arrived damaged, incomplete or out of date     (never generated from)
├── CoordinatorDied      the coordinator's process ended                     (the run resumes from a checkpoint)
├── EngineError          an engine failed while sampling
│   └── StaleWeights     an engine does not hold the weights that were asked for
└── DeadlineExceeded     something was waited for longer than its deadline
"""


class QurlError(Exception):
    """Base class of all errors of qurl_ray."""


class ConfigError(QurlError, ValueError):
    """A setting is missing, unknown or contradicts another."""


class ExtensionError(ConfigError):
    """A function of the user's that a setting names raised, or returned what it may not."""


class PlacementError(QurlError, RuntimeError):
    """The cluster can never provide the resources that a run needs, or not on the nodes where it needs them."""


class DataError(QurlError, ValueError):
    """A task, data set or prompt cannot be used."""


class RewardError(QurlError, ValueError):
    """A reward function cannot be found or cannot be used."""


class EnvironmentFailed(QurlError, ValueError):
    """An environment cannot be found or cannot be used."""


class QuantizationError(QurlError, ValueError):
    """A weight cannot be quantized, or a model has nothing to quantize."""


class CheckpointError(QurlError, RuntimeError):
    """A checkpoint is damaged, incomplete, or belongs to another run; nothing is loaded from it."""


class SyncError(QurlError, RuntimeError):
    """Weights arrived damaged, incomplete or out of date; nothing is generated with them."""


class CoordinatorDied(QurlError, RuntimeError):
    """The coordinator's process ended; Ray starts another, and the learner resumes from the latest checkpoint."""


class EngineError(QurlError, RuntimeError):
    """An engine failed while sampling."""


class StaleWeights(EngineError):
    """An engine does not hold the requested version of the weights."""


class DeadlineExceeded(QurlError, TimeoutError):
    """An operation took longer than its deadline; the message names the operation."""
