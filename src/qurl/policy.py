"""The trained model: a transformers causal LM with FP32 master weights.

Log-probs and entropies are computed in chunks of positions, so that [B, T, V] never exists.
Shapes: B sequences, T positions, N scored tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qurl.config import ModelConfig
from qurl.errors import ModelError
from qurl.types import Batch


@dataclass(frozen=True)
class TokenScores:
    """Per-token results of a forward, 0 where the batch's mask is 0."""

    logp: Tensor  # [B, T]
    entropy: Tensor  # [B, T]


class Policy:
    """pi_theta: loads, scores tokens, saves as a normal Hugging Face folder."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, config: ModelConfig, device: torch.device
    ) -> None:
        self.model = model.to(device)
        self.tokenizer = tokenizer
        self.device = device
        self.logits_chunk = config.logits_chunk
        self.compute_dtype = _compute_dtype(config, device)
        disable_dropout_(self.model)
        make_savable_(self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            self.model.train()
        _check_head(self.model)

    def score(self, batch: Batch, *, needs_entropy_grad: bool = False) -> TokenScores:
        """log pi_theta and entropy of each response token, at the batch's temperature."""
        hidden = hidden_states(self.model, batch.token_ids, self.compute_dtype)  # [B, T, H]
        keep = batch.mask[:, 1:].bool()
        states, targets = hidden[:, :-1][keep], batch.token_ids[:, 1:][keep]  # [N, H], [N]
        logps, entropies = [], []
        for piece, target in zip(
            states.split(self.logits_chunk), targets.split(self.logits_chunk), strict=True
        ):
            logp, entropy = checkpoint(
                self._score_chunk,
                piece,
                target,
                batch.temperature,
                needs_entropy_grad,
                use_reentrant=False,
            )
            logps.append(logp)
            entropies.append(entropy)
        return TokenScores(_scatter(logps, batch.mask), _scatter(entropies, batch.mask))

    def _score_chunk(
        self, states: Tensor, targets: Tensor, temperature: float, needs_entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        with autocast(states.device, self.compute_dtype):
            logits = apply_head(self.model, states)
        logits = logits.float() / temperature  # [n, V]
        log_z = logits.logsumexp(-1)
        logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
        with torch.set_grad_enabled(needs_entropy_grad and torch.is_grad_enabled()):
            entropy = log_z - (logits.softmax(-1) * logits).sum(-1)
        return logp, entropy

    def freeze_(self) -> Policy:
        """Make this a reference that is never trained."""
        self.model.requires_grad_(False).eval()
        return self

    def save(self, folder: Path) -> None:
        """Write a normal Hugging Face folder (safetensors, config, tokenizer)."""
        self.model.save_pretrained(folder)  # type: ignore[operator]
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def load_policy(path: str | Path, config: ModelConfig, device: torch.device) -> Policy:
    """A causal LM of transformers, in FP32, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would garble the run's own progress line
    if not Path(path).exists() and not _may_be_hub_name(str(path)):
        raise ModelError(f"model.path = {str(path)!r} does not exist (seen from {Path.cwd()})")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            # transformers would go on with random numbers in their place.
            raise ValueError(f"the weights lack {', '.join(missing[:3])}")
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"model.path = {str(path)!r} cannot be loaded as a causal LM; give a folder with "
            "config.json, weights and tokenizer, or a hub name that is reachable from here: "
            f"{error}"
        ) from error
    return Policy(model, tokenizer, config, device)


def _may_be_hub_name(path: str) -> bool:
    """Names of the hub are `name` or `owner/name`."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~"))


def make_savable_(model: Any) -> None:
    """Repair sampling defaults that transformers reads but refuses to write."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True


def hidden_states(model: nn.Module, token_ids: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """[B, T, H]: the backbone's output after its last norm, without the head."""
    with autocast(token_ids.device, compute_dtype):
        return model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state  # type: ignore[operator]


def apply_head(model: nn.Module, states: Tensor) -> Tensor:
    """[N, V]: what the model's own forward makes of hidden states."""
    config: Any = model.config
    logits = model.get_output_embeddings()(states)  # type: ignore[operator]
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def _check_head(model: nn.Module) -> None:
    """Refuse a model whose logits are not what `apply_head` computes."""
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    ours = apply_head(model, hidden_states(model, ids, torch.float32)).float()
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    gap = float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max())
    if not gap < 1e-3:
        raise ModelError(
            f"{type(model).__name__} computes its logits in a way that is not known here (largest "
            f"log-prob difference {gap:.3g} on a test prompt); it cannot be trained"
        )


def disable_dropout_(model: nn.Module) -> None:
    """The proximal policy and the first update must be the same function."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):  # for F.dropout
                setattr(module, name, 0.0)


def _compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.compute_dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def _scatter(pieces: list[Tensor], mask: Tensor) -> Tensor:
    """Values of the masked tokens, in order, back at their places in [B, T]."""
    values = torch.cat(pieces) if pieces else mask.new_zeros(0)
    return torch.zeros_like(mask).masked_scatter(mask.bool(), values)
