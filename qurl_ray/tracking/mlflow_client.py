"""MLflow's client for reading: it gives up soon, and its failures are errors of ours that name the address."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# These are read when mlflow is imported, or at a request.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

from mlflow.tracking import MlflowClient

from qurl_ray.config.shown import reason, shown_address
from qurl_ray.errors import ConfigError, QurlError


@contextmanager
def mlflow_at(uri: str, attempt: str) -> Iterator[MlflowClient]:
    """Yield a client of the server or database at `uri`.

    Args:
        attempt: the action on the server, for errors: "read from".

    Raises:
        ConfigError: MLflow cannot be reached, or refuses the action.
    """
    try:
        yield MlflowClient(uri, registry_uri=uri)
    except QurlError:
        raise
    except Exception as error:  # MLflow passes on all errors of the clients of its stores
        raise ConfigError(
            f"cannot {attempt} MLflow at {shown_address(uri)}: {reason(error, 500, address=uri)}"
        ) from None
