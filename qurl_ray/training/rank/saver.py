"""Saving of checkpoints and policies by all ranks of the learner."""

import json
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import cast

import torch
from ray.actor import ActorHandle
from safetensors import SafetensorError
from torch import distributed

from qurl_ray.config import RunConfig
from qurl_ray.data.trained import keep_settings
from qurl_ray.errors import CheckpointError, ConfigError, QurlError
from qurl_ray.learner.protocol import Learner
from qurl_ray.policy.adapters import SavedAdapter, merged, save_adapter, target_modules
from qurl_ray.policy.export import quantized_folder
from qurl_ray.policy.load import StoredWeights, architecture, load_tokenizer
from qurl_ray.policy.save import Take, policy_folder
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.uaq import folded_offsets, unfolded
from qurl_ray.runs.checkpoint import LOOP, complete, partial_folder, prune
from qurl_ray.training.rank.precision import fleet_weight_max_code
from qurl_ray.training.rank.wait import wait
from qurl_ray.types import Event, PolicySpec


def check_shared(run_dir: Path) -> None:
    """Raise ConfigError unless this process sees the run folder that the driver has created."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{run_dir} is not there on {socket.gethostname()}, where a rank of the learner is: every rank writes its "
            "part of a checkpoint, so output_dir (or $QURL_RUNS) must be on storage that all nodes share"
        )


class Saver:
    """Writer of checkpoints and policies to the run's folder. Every rank calls the same methods, because gathering a
    sharded learner's parameters is collective."""

    def __init__(
        self, config: RunConfig, learner: Learner, spec: PolicySpec, coordinator: ActorHandle, run_dir: Path, rank: int
    ) -> None:
        self._config, self._learner, self._coordinator = config, learner, coordinator
        self._run_dir, self._rank, self._spec = run_dir, rank, spec
        self._tokenizer = load_tokenizer(spec)
        keep_settings(self._tokenizer, config.task)
        self._model = architecture(spec, self._tokenizer)

    def checkpoint(self, step: int, reward: float | None) -> None:
        """Write checkpoints/step-<n>; delete older checkpoints as the settings say."""
        partial = partial_folder(self._run_dir, step)
        with _writing(f"the checkpoint of step {step}", partial.parent):
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                # Of files that are open elsewhere, NFS leaves `.nfs…`, and with it the folder.
                (partial / "learner").mkdir(parents=True, exist_ok=True)
            barrier()
            self._learner.save(partial / "learner")
            if self._learner.adapters:
                self._save_adapter(partial / "adapter")
            else:
                self._save_policy(partial / "policy")
            if self._rank == 0:
                call = self._coordinator.state.remote(step)
                state = wait(call, self._config.sync.timeout_s, "the coordinator's state")
                (partial / LOOP).write_text(json.dumps(state))
            barrier()  # every rank has written its files
            if self._rank == 0:
                made = complete(partial, step=step, reward=reward)
                prune(self._run_dir, self._config.checkpoint.keep)
                event = Event(kind="checkpoint", step=step, values={"folder": str(made.folder)})
                wait(self._coordinator.tell.remote(event), self._config.sync.timeout_s, "the coordinator")
        barrier()  # no rank asks for the next step's rollouts before the coordinator's state is on disk

    def final(self) -> None:
        """Write policy/, policy-<format>/ if a quantized policy is exported, and adapter/ if there are adapters, which
        the other two have in their weights."""
        exported = self._config.export.format(self._config.rollout.quantization)
        equalizes = exported != "none" and self._config.quantization.equalizes(exported)
        factors = self._learner.factors() if equalizes else {}

        def open_quantized() -> AbstractContextManager[Take]:
            # Still folded by UAQ, and equalized: its codes are those that the engines hold and the evaluation judges.
            fmt = get_format(exported, fleet_weight_max_code(self._config, self._coordinator, exported))
            folder = self._run_dir / f"policy-{exported}"
            kept = self._config.quantization.kept(self._model.config.num_hidden_layers)
            return quantized_folder(self._model, self._tokenizer, folder, fmt, kept, factors)

        with _writing("the final policy", self._run_dir):
            try:
                if self._learner.adapters:
                    self._save_adapter(self._run_dir / "adapter")
                if exported != "none":
                    self._stream(open_quantized)
            finally:  # even if the export fails
                self._save_policy(self._run_dir / "policy")

    def _save_policy(self, folder: Path) -> None:
        """Write the policy in full precision, without UAQ's scale."""
        quantization = self._config.quantization
        scale, offsets = quantization.uaq_scale, {}
        if scale != 1:
            offsets = folded_offsets(self._model, quantization.uaq_layers)
        self._stream(
            lambda: policy_folder(self._model, self._tokenizer, folder),
            lambda parameters: unfolded(parameters, offsets, scale),
        )

    def _save_adapter(self, folder: Path) -> None:
        """Write the adapters as PEFT does."""
        adapters = self._learner.adapters
        assert adapters
        parameters = self._adapter()
        if self._rank == 0:
            saved = SavedAdapter(
                adapters=adapters, base=self._spec.source, parameters=parameters, coded=self._learner.coded_base
            )
            save_adapter(folder, saved, target_modules(self._model, adapters), self._tokenizer)

    def _adapter(self) -> dict[str, torch.Tensor]:
        """Return copies of the adapters' matrices by name. Collective."""
        trained = self._learner.named_parameters(trained=True)
        return {name: value.detach().to("cpu", copy=True) for name, value in trained if isinstance(value, torch.Tensor)}

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the policy's parameters, with the adapters in them. Collective."""
        adapters = self._learner.adapters
        if not adapters:
            return cast(Iterator[tuple[str, torch.Tensor]], self._learner.named_parameters())
        adapter = self._adapter()
        if self._rank:
            return iter(())
        stored = StoredWeights(self._spec, self._model)
        base = ((name, stored.rows(name, 0, len(weight))) for name, weight in self._model.named_parameters())
        return merged(base, adapter, adapters.scaling)

    @torch.no_grad()
    def _stream(
        self,
        opened: Callable[[], AbstractContextManager[Take]],
        changed: Callable[[Iterator[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]] = iter,
    ) -> None:
        """Pass the policy's parameters, one after the other, to the writer that rank 0 opens. Collective: an error of
        rank 0's is raised when the other ranks, which gather them with it, are through."""
        parameters = self._parameters()
        try:
            if self._rank == 0:
                with opened() as take:
                    for name, parameter in changed(parameters):
                        take(name, parameter)
        finally:
            for _ in parameters:
                pass


@contextmanager
def _writing(files: str, folder: Path) -> Iterator[None]:
    """Turn the many errors of a full or lost disk into one CheckpointError that says what could not be written, and
    where."""
    try:
        yield
    except QurlError:  # a deadline is an OSError, too
        raise
    except (OSError, SafetensorError, RuntimeError) as error:  # torch and DeepSpeed raise RuntimeError
        raise CheckpointError(
            f"{files} cannot be written to {folder}: {error}; what is complete there is kept"
        ) from error


def barrier() -> None:
    if distributed.is_initialized():
        distributed.barrier()
