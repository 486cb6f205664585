"""Records for MLflow: metrics, parameters and traces, made from a run's events. This module contacts no server.

The same event always gives the same records, so that records missed by a server can be sent again from the run's files.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from mlflow.entities import AssessmentSource, Feedback, Metric, Span, SpanType, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, MAX_PARAM_VAL_LENGTH
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode

from qurl_ray.report.run_files import finite
from qurl_ray.report.text import storable
from qurl_ray.report.values import flatten, number, plain
from qurl_ray.tracking.numbers import event_numbers
from qurl_ray.types import Event

TRACE_NAME = "sampled rollout"
_PREVIEW_CHARACTERS = 1000
_Sample = Mapping[str, Any]
"""One sample: a line of samples.jsonl, or an entry of an event of kind `samples`."""


# --- metrics and parameters -------------------------------------------------------------------------------------------


def event_metrics(event: Event, at: float) -> list[Metric]:
    """Return the numbers of an event as metrics; `at` is unix time in seconds."""
    return to_metrics(event_numbers(event), step=event.step, at=at)


def to_metrics(values: Mapping[str, Any], *, step: int, at: float) -> list[Metric]:
    """Return the numbers in `values` under names that MLflow accepts; NaN stays NaN. `at` is unix time in seconds."""
    leaves = ((key, number(value)) for key, value in flatten(values, "/"))
    return [Metric(metric_name(key), value, int(at * 1000), step) for key, value in leaves if value is not None]


def metric_name(key: str) -> str:
    """Return the most similar name that MLflow accepts: letters, digits and _ . - space, no empty or dot path parts."""
    parts = re.sub(r"[^\w.\- /]", "_", key).split("/")
    path = "/".join(part for part in parts if part not in ("", ".", ".."))
    path = re.sub(r"^\.+", "_", path)  # MLflow takes any name that starts with two dots for a parent folder
    return path[:MAX_ENTITY_KEY_LENGTH].rstrip("/") or "_"


def param_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(plain(value))
    return storable(text)[:MAX_PARAM_VAL_LENGTH]


# --- traces -----------------------------------------------------------------------------------------------------------


def trace_id(run_id: str, step: int, sample: _Sample) -> str:
    """Id of a trace. It depends only on the run and the sample, so that sending it twice gives one trace."""
    return f"tr-{_digest(run_id, step, sample.get('uid'), bits=128):032x}"


def trace_info(run_id: str, experiment_id: str, step: int, sample: _Sample, at: float) -> TraceInfo:
    """Header of a sample's trace: the fields that MLflow lists, filters by, and shows with the run."""
    identity = trace_id(run_id, step, sample)
    reward, gaps = finite(sample.get("reward")), [gap for gap in token_gaps(sample) if gap is not None]
    ok = sample.get("status", "ok") == "ok"
    tags = {
        TraceTagKey.TRACE_NAME: TRACE_NAME,
        "step": str(step),
        "uid": storable(str(sample.get("uid", ""))),
        "reward": "" if reward is None else f"{reward:g}",
        "largest_gap": f"{max(gaps, key=abs):.4f}" if gaps else "",
    }
    return TraceInfo(
        trace_id=identity,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=int(at * 1000),
        execution_duration=0,
        state=TraceState.OK if ok else TraceState.ERROR,
        request_preview=_text(sample, "prompt")[:_PREVIEW_CHARACTERS],
        response_preview=_text(sample, "answer")[:_PREVIEW_CHARACTERS],
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id},
        tags={key: value for key, value in tags.items() if value},
        assessments=[] if reward is None else [_reward(identity, reward, at)],
    )


def trace_spans(run_id: str, step: int, sample: _Sample, at: float) -> list[Span]:
    """Convert a sample to a tree of spans: the rollout, with two children for the engine's tokens and the verdict.
    `samples.jsonl` has only one time, so spans have no duration; one nanosecond between them preserves their order."""
    identity = trace_id(run_id, step, sample)
    prompt, answer, expected = (_text(sample, key) for key in ("prompt", "answer", "expected"))
    reward = {"reward": finite(sample.get("reward")), "status": sample.get("status", "ok")}
    gaps = token_gaps(sample)
    known = [abs(gap) for gap in gaps if gap is not None]
    tokens = {
        "tokens": sample.get("tokens"),
        "logprob_engine": sample.get("logprobs"),
        "logprob_learner": sample.get("proximal_logprobs"),
        "logprob_gap": gaps or None,
        "mean_abs_gap": math.fsum(known) / len(known) if known else None,
        "largest_abs_gap": max(known, default=None),
    }
    root = _span(identity, TRACE_NAME, at, SpanType.CHAIN, prompt, {"answer": answer} | reward, step=step)
    uid = sample.get("uid")
    generated = _span(identity, "generate", at, SpanType.LLM, prompt, answer, parent=root, order=1, uid=uid, **tokens)
    asked = {"answer": answer, "expected": expected}
    judged = _span(identity, "judge", at, SpanType.EVALUATOR, asked, reward, parent=root, order=2)
    return [root, generated, judged]


def token_gaps(sample: _Sample) -> list[float | None]:
    """Engine's log-prob minus the learner's for every token, in nats; empty if the learner's were not recorded."""
    pairs = zip(sample.get("logprobs") or [], sample.get("proximal_logprobs") or [], strict=False)
    return [None if finite(b) is None or finite(p) is None else round(b - p, 4) for b, p in pairs]


def _reward(identity: str, reward: float, at: float) -> Feedback:
    found = Feedback(
        name="reward",
        value=reward,
        source=AssessmentSource("CODE", "task.reward"),
        trace_id=identity,
        create_time_ms=int(at * 1000),
        last_update_time_ms=int(at * 1000),
    )
    found.assessment_id = f"a-{_digest(identity, 'reward', bits=128):032x}"
    return found


def _span(
    identity: str,
    name: str,
    at: float,
    kind: str,
    inputs: Any,
    outputs: Any,
    *,
    parent: Span | None = None,
    order: int = 0,
    **more: Any,
) -> Span:
    """Create a span. `more` are attributes; those that are None are omitted."""
    attributes = {
        SpanAttributeKey.REQUEST_ID: identity,
        SpanAttributeKey.SPAN_TYPE: kind,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
    } | {key: value for key, value in more.items() if value is not None}
    found = ReadableSpan(
        name=name,
        context=_context(identity, _digest(identity, name, bits=64)),
        parent=_context(identity, int(parent.span_id, 16)) if parent else None,
        start_time=int(at * 1e9) + order,
        end_time=int(at * 1e9) + order,
        attributes={key: storable(json.dumps(plain(value), ensure_ascii=False)) for key, value in attributes.items()},
        status=Status(StatusCode.OK),
        resource=Resource.get_empty(),  # else it would be the machine's, which is irrelevant for a rollout
    )
    return Span(found)


def _context(identity: str, span: int) -> SpanContext:
    return SpanContext(trace_id=int(identity.removeprefix("tr-"), 16), span_id=span, is_remote=False)


def _digest(*parts: Any, bits: int) -> int:
    """Hash the text of the parts to a positive number of `bits` bits."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[: bits // 8], "big") or 1


def _text(sample: _Sample, key: str) -> str:
    found = sample.get(key)
    return "" if found is None else storable(str(found))
