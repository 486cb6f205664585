"""Settings of the policy that is trained."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from qurl_ray.config.section import Section

TINY_CHARACTERS = "0123456789+-*= "
"""Characters that the tiny policy reads, besides the calculator's signs."""


class TinyModel(Section):
    """A small policy with a character-level tokenizer, made on this machine. Its architecture is Qwen2's, or Qwen3's if
    it has experts."""

    type: Literal["tiny"] = "tiny"
    hidden_size: int = Field(256, ge=64)
    """Width of the hidden states; `hidden_size` / `heads` must be 32, 64, 96 or 128."""
    layers: int = Field(4, ge=1)
    """Number of decoder layers."""
    heads: int = Field(4, ge=1)
    """Number of attention heads of a layer; a multiple of `kv_heads`."""
    kv_heads: int = Field(2, ge=1)
    """Number of key and value heads of a layer (grouped-query attention)."""
    intermediate_size: int = Field(512, ge=64)
    """Width of the hidden layer of each MLP, or of each expert."""
    experts: int = Field(0, ge=0)
    """Experts of each layer; 0 makes a dense policy, more a mixture of experts in Qwen3's architecture."""
    active_experts: int = Field(2, ge=1)
    """Experts that compute each token."""
    max_length: int = Field(64, ge=8)
    """Context length: prompt and answer together, in tokens."""
    cold_start: bool = True
    """Train the policy on the task by supervised learning before the run, until `cold_start_accuracy`; false leaves
    random weights."""
    calculator: bool = False
    """Teach half of the problems, those whose first digit is odd, with calls of the calculator (`environment.type`),
    and the others without. The vocabulary then has its signs, too."""
    cold_start_accuracy: float = Field(0.4, gt=0, lt=1)
    """Share of problems answered correctly, by greedy decoding, at which the cold start stops. It is measured on
    training problems that the cold start does not learn from: a fifth of them, at most 1000."""
    cold_start_steps: int = Field(3000, ge=1)
    """Largest number of supervised steps; it is an error if the accuracy is not reached by then."""
    seed: int = 0
    """Seed of the random weights and of the cold start."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> "TinyModel":
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError("hidden_size must be a multiple of heads, and heads a multiple of kv_heads")
        if self.hidden_size // self.heads not in (32, 64, 96, 128):
            raise ValueError(f"hidden_size / heads must be 32, 64, 96 or 128, not {self.hidden_size // self.heads}")
        if self.experts == 1:
            raise ValueError("experts=1 is a dense policy: set it to 0, or to 2 and more")
        if self.experts and self.active_experts > self.experts:
            raise ValueError(f"active_experts={self.active_experts} is more than experts={self.experts}")
        return self


class PretrainedModel(Section):
    """A causal language model from a local folder or the Hugging Face hub."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """Folder of the model, or its Hugging Face hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."""
    max_length: int | None = Field(None, ge=8)
    """Context length to use (prompt and answer together), in tokens. null uses the model's own; a value above that is
    an error."""
    overrides: dict[str, Any] = {}
    """Entries that replace those of the model's config.json, such as `{max_position_embeddings: 32768}`; the trained
    policy is saved with them."""


class GgufModel(Section):
    """A causal language model in a GGUF file, dequantized to float32 once and kept in the cache folder."""

    type: Literal["gguf"] = "gguf"
    path: str
    """Path of the GGUF file; `<package>/<file>` is also looked for among the installed Python packages."""
    max_length: int | None = Field(None, ge=8)
    """Context length to use (prompt and answer together), in tokens. null uses the model's own; a value above that is
    an error."""


ModelConfig = Annotated[TinyModel | PretrainedModel | GgufModel, Field(discriminator="type")]
