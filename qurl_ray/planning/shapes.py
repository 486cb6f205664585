"""Shapes of models, which determine memory, reads and products. From a table or a local config.json; no network."""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qurl_ray.config.model import GgufModel, ModelConfig, TinyModel
from qurl_ray.config.paths import expanded
from qurl_ray.errors import ConfigError
from qurl_ray.tables import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a decoder with gated MLPs, in each layer one, or experts. Norms, biases and routers are left out: under
    0.3 % of all parameters."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    """True if the head uses the weights of the embedding."""
    window: int = 0
    """Tokens that a local layer attends to; 0 if all layers attend to all tokens."""
    full_every: int = 1
    """One of every `full_every` layers attends to all tokens."""
    experts: int = 1
    """MLPs of each layer."""
    active: int = 1
    """MLPs that compute each token."""

    @property
    def block_params(self) -> int:
        """Number of weights of the block linears, which are the weights that a format quantizes."""
        return self._with_mlps(self.experts)

    @property
    def active_params(self) -> int:
        """Number of weights of the block linears with which a token is multiplied."""
        return self._with_mlps(self.active)

    @property
    def expert_params(self) -> int:
        """Number of weights of experts; 0 for a dense model."""
        return self.block_params - self._with_mlps(0) if self.experts > 1 else 0

    def read_params(self, batch: float) -> float:
        """Number of weights of the block linears that a step of `batch` tokens reads, if experts are chosen evenly."""
        chosen = 1 - (1 - self.active / self.experts) ** batch
        return self._with_mlps(self.experts * chosen)

    def _with_mlps(self, count: Any) -> Any:
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.intermediate * count)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        return self.block_params + self.head_params * (1 if self.tied else 2)

    def linears(self) -> Counter[tuple[int, int]]:
        """Number of linears of each size (inputs, outputs), including the head."""
        queries, keys, wide = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        block = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        block += self.experts * [(self.hidden, wide), (self.hidden, wide), (wide, self.hidden)]
        return Counter(self.layers * block + [(self.hidden, self.vocab)])

    def adapter_params(self, rank: int) -> int:
        """Number of parameters of LoRA adapters of all linears but the head."""
        of_blocks = self.linears() - Counter([(self.hidden, self.vocab)])
        return sum(count * rank * (inputs + outputs) for (inputs, outputs), count in of_blocks.items())

    def weight_bytes(self, block_bytes: float) -> float:
        """Bytes of resident weights: `block_bytes` for each weight of the block linears, two for the others."""
        return self.block_params * block_bytes + 2 * (self.params - self.block_params)

    def kv_bytes(self, context: float, bytes_each: float = 2) -> float:
        """Bytes of keys and values of one sequence with `context` tokens."""
        full = -(-self.layers // self.full_every)
        local = min(context, self.window) if self.window else context
        tokens = full * context + (self.layers - full) * local
        return 2 * self.kv_heads * self.head_dim * bytes_each * tokens


# hidden, layers, heads, key heads, head width, intermediate, vocabulary, tied, window, full every, experts, active
_TABLE = {
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192, 128256, True),
    "Llama-3.2-3B": (3072, 28, 24, 8, 128, 8192, 128256, True),
    "Llama-3.1-8B": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "Llama-3.1-70B": (8192, 80, 64, 8, 128, 28672, 128256, False),
    "Llama-3.3-70B": (8192, 80, 64, 8, 128, 28672, 128256, False),
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": (2048, 36, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": (5120, 48, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": (5120, 64, 40, 8, 128, 27648, 152064, False),
    "Qwen2.5-72B": (8192, 80, 64, 8, 128, 29568, 152064, False),
    "Qwen2.5-Math-1.5B": (1536, 28, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-Math-7B": (3584, 28, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-Math-72B": (8192, 80, 64, 8, 128, 29568, 152064, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1536, 28, 12, 2, 128, 8960, 151936, False),
    "Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": (2560, 36, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": (4096, 36, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": (5120, 40, 40, 8, 128, 17408, 151936, False),
    "Qwen3-32B": (5120, 64, 64, 8, 128, 25600, 151936, False),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 128, 768, 151936, False, 0, 1, 128, 8),
    "OLMoE-1B-7B": (2048, 16, 16, 16, 128, 1024, 50304, False, 0, 1, 64, 8),
    "Mixtral-8x7B": (4096, 32, 32, 8, 128, 14336, 32000, False, 0, 1, 8, 2),
    "gpt-oss-20b": (2880, 24, 64, 8, 64, 2880, 201088, False, 128, 2, 32, 4),
    "gpt-oss-120b": (2880, 36, 64, 8, 64, 2880, 201088, False, 128, 2, 128, 4),
    "SmolLM2-135M": (576, 30, 9, 3, 64, 1536, 49152, True),
    "SmolLM2-360M": (960, 32, 15, 5, 64, 2560, 49152, True),
    "SmolLM2-1.7B": (2048, 24, 32, 32, 64, 8192, 49152, True),
    "gemma-2-2b": (2304, 26, 8, 4, 256, 9216, 256000, True, 4096, 2),
    "gemma-2-9b": (3584, 42, 16, 8, 256, 14336, 256000, True, 4096, 2),
    "gemma-3-270m": (640, 18, 4, 1, 256, 2048, 262144, True, 512, 6),
    "gemma-3-1b": (1152, 26, 4, 1, 256, 6912, 262144, True, 512, 6),
    "gemma-3-4b": (2560, 34, 8, 4, 256, 10240, 262208, True, 1024, 6),
    "tiny": (256, 4, 4, 2, 64, 512, 18, True),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MIXTURES = ENGINES.entries["torch"].experts  # those that the learner trains
_FIELDS = [name for name in Shape.__dataclass_fields__ if name != "name"]
SHAPES = {name: Shape(name=name, **dict[str, Any](zip(_FIELDS, row, strict=False))) for name, row in _TABLE.items()}
"""Shapes by model name, as in the models' own config.json. `tiny` is the quickstart's policy."""


def find_shape(model: str) -> Shape:
    """Return the shape of a model, from a folder with a config.json, or by name.

    A prefix or suffix of a known name is ignored: `Qwen/Qwen2.5-7B-Instruct`.

    Raises:
        ConfigError: the model is unknown (the message names the nearest), or this package does not train it.
    """
    folder = expanded(model)
    if folder.is_dir():
        return _from_folder(folder)
    name = model.rstrip("/").rpartition("/")[2].lower()
    within = [key for key in SHAPES if re.search(rf"(?<![a-z0-9.]){re.escape(key.lower())}(?![a-z0-9])", name)]
    if within:
        return SHAPES[max(within, key=len)]
    nearest = get_close_matches(name, [key.lower() for key in SHAPES], n=3, cutoff=0.5)
    hint = ", ".join(key for key in SHAPES if key.lower() in nearest) or ", ".join(SHAPES)
    raise ConfigError(f"no shape of {model!r} is known, and it is no folder here; near it: {hint}")


def configured_shape(model: ModelConfig) -> Shape:
    """Return the shape of the model in a run's settings.

    Raises:
        ConfigError: see find_shape.
    """
    if isinstance(model, TinyModel):
        return replace(
            SHAPES["tiny"],
            hidden=model.hidden_size,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.hidden_size // model.heads,
            intermediate=model.intermediate_size,
            experts=model.experts or 1,
            active=model.active_experts if model.experts else 1,
        )
    return find_shape(Path(model.path).name if isinstance(model, GgufModel) else model.path)


def _from_folder(folder: Path) -> Shape:
    path = folder / "config.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    config = (read.get("text_config") or read) if isinstance(read, dict) else {}
    counted = next((key for key in _EXPERTS if (config.get(key) or 0) > 1), None)
    if counted and config.get("model_type") not in _MIXTURES:
        raise ConfigError(f"{path}: a mixture of experts of a kind that this package does not train")

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key) or default
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path}: {key} is {value!r}, expected a whole number above 0")
        return value

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    width = count("moe_intermediate_size" if counted and "moe_intermediate_size" in config else "intermediate_size")
    # An expert for all tokens counts as those of its width: they are always active.
    always = round((config.get("shared_expert_intermediate_size") or 0) / width) if counted else 0
    return Shape(
        name=folder.resolve().name,
        hidden=hidden,
        layers=count("num_hidden_layers"),
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", max(1, hidden // heads)),
        intermediate=width,
        vocab=count("vocab_size"),
        # Files of Gemma need not say that the head is tied, and those of Llama and Qwen that it is not.
        tied=bool(config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith("gemma"))),
        experts=count(counted) + always if counted else 1,
        active=count("num_experts_per_tok") + always if counted else 1,
    )
