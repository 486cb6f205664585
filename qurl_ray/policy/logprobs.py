"""Log-probs of tokens, one definition for engine and learner."""

import torch
from transformers import PreTrainedModel


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 log-probs over the last axis of logits / temperature."""
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def token_logprobs(
    model: PreTrainedModel, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor, temperature: float
) -> torch.Tensor:
    """log p(token t | tokens before it) where `mask_BT`, 0 elsewhere.

    Args:
        token_ids_BT: int64, prompt and answer, padded on the right with any valid id.
        mask_BT: bool, True on the tokens to score; never on the first of a sequence.

    Returns:
        float32 [B, T]. Vocabulary-wide rows exist only for masked tokens: the prompt needs no logits.
    """
    inputs, targets = token_ids_BT[:, :-1], mask_BT[:, 1:]
    positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
    hidden_BTd = model.base_model(input_ids=inputs, position_ids=positions, use_cache=False).last_hidden_state
    logprobs_NV = log_softmax(model.get_output_embeddings()(hidden_BTd[targets]), temperature)
    taken_N = logprobs_NV.gather(1, token_ids_BT[:, 1:][targets][:, None])[:, 0]
    out_BT = torch.zeros(token_ids_BT.shape, dtype=torch.float32, device=inputs.device)
    out_BT[:, 1:][targets] = taken_N
    return out_BT
