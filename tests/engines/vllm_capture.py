"""What a CUDA graph does, on a CPU: record the operations of a decode step with their memory, and replay them."""

from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qurl_ray.engines.vllm import engine as vllm_engine
from qurl_ray.engines.vllm.worker import WorkerExtension


class Recorder(TorchDispatchMode):
    """Records operations and the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, found))
        return found


def replay(tape: list[tuple[Any, tuple, dict, Any]]) -> None:
    """Run the operations again, with results in the memory of the first time."""
    for func, args, kwargs, before in tape:
        now = func(*args, **kwargs)
        for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Capturing(WorkerExtension):
    """Methods of vLLM's workers that look at the model, and record and replay its steps."""

    def qurl_record(self) -> None:
        """Record the next step of one token, and replay it at each later one."""
        model = self.model_runner.model
        run, state = model.forward, {}
        self.replayed = 0

        def forward(input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any, **others: Any) -> Any:
            if len(input_ids) != 1:
                return run(input_ids, positions, *rest, **others)
            if not state:
                state["inputs"] = (input_ids.clone(), positions.clone())
                with Recorder() as recorder:
                    state["result"] = run(*state["inputs"], *rest, **others)
                state["tape"] = recorder.tape
                return state["result"].clone()
            for target, value in zip(state["inputs"], (input_ids, positions), strict=True):
                target.copy_(value)
            replay(state["tape"])
            self.replayed += 1
            return state["result"].clone()

        model.forward = forward

    def qurl_replayed(self) -> int:
        """Number of steps that were replayed."""
        return self.replayed

    def qurl_addresses(self) -> dict[str, int]:
        """Addresses of all parameters, and of codes and scales of linears."""
        model = self.model_runner.model
        found = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            for i, linear in enumerate(getattr(getattr(module, "quant_method", None), "held", ())):
                found |= {f"{name}.{i}.{key}": buffer.data_ptr() for key, buffer in linear.named_buffers()}
        return found

    def qurl_compilations(self) -> int:
        """Number of graphs that were compiled in this process."""
        return counters["stats"]["unique_graphs"]


def capturing() -> None:
    """Have engines of this process mix Capturing into vLLM's workers."""
    vllm_engine.EXTENSION = f"{__name__}.Capturing"
