"""The trained model: a transformers causal LM with FP32 master weights.

Forwards are packed: no token of padding is computed (`qurl.trainer.packing`). Log-probs
and entropies are computed in chunks of tokens, so that [B, T, V] never exists.
Shapes: B sequences, T positions, N tokens, M scored tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qurl.config import ModelConfig
from qurl.errors import ModelError
from qurl.ops.device import default_dtype
from qurl.trainer.head import logit_scale, plain_head, token_scores
from qurl.trainer.layers import decoder_layers, fuse_layers_
from qurl.trainer.packing import Layout, Packed, use_packed_attention_
from qurl.types import Batch

PACKING_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""How far states may be from those of padded sequences, relative to their size: rounding, through
all layers. What leaks from one sequence into the next shows in FP32."""


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
        notes = []
        is_fusing = device.type == "cuda" and not config.compile  # which would fuse by itself
        if is_fusing and not fuse_layers_(self.model):
            kind = type(self.model).__name__
            notes.append(f"{kind} is trained without fused kernels; model.compile may help")
        obstacle = _pack_forwards_(self.model, self.compute_dtype)
        self.is_packed = obstacle is None
        if obstacle is not None:
            notes.append(f"sequences are padded for training: {obstacle}")
        self.notes: tuple[str, ...] = tuple(notes)  # warnings for whoever trains it
        self.is_compiled = config.compile
        if config.compile:
            compile_layers_(self.model)

    def layout(self, batch: Batch) -> Layout:
        """How this policy's forwards see a batch; what they would wait for is read here."""
        return Layout.of(batch, is_packed=self.is_packed)

    def score(
        self, batch: Batch, layout: Layout | None = None, *, needs_entropy_grad: bool = False
    ) -> TokenScores:
        """log pi_theta and entropy of each response token, at the batch's temperature."""
        layout = layout or self.layout(batch)
        hidden = hidden_states(self.model, layout.token_ids, self.compute_dtype, **layout.options)
        states, targets = layout.before(hidden), layout.targets  # [M, H], [M]
        head = plain_head(self.model)
        if head is None:
            logp, entropy = self._score_checkpointed(
                states, targets, batch.temperature, needs_entropy_grad
            )
        else:
            logp, entropy = token_scores(
                states,
                head.weight,
                head.bias,
                targets,
                temperature=batch.temperature,
                chunk=self.logits_chunk,
                compute_dtype=self.compute_dtype,
                logit_scale=head.logit_scale,
                needs_entropy_grad=needs_entropy_grad,
            )
        return TokenScores(layout.spread(logp), layout.spread(entropy))

    def _score_checkpointed(
        self, states: Tensor, targets: Tensor, temperature: float, needs_entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """For heads that are more than a linear layer: torch's own gradients."""
        chunks = zip(states.split(self.logits_chunk), targets.split(self.logits_chunk), strict=True)
        scores = [
            checkpoint(
                self._score_chunk, *chunk, temperature, needs_entropy_grad, use_reentrant=False
            )
            for chunk in chunks
        ]
        logps, entropies = zip(*scores, strict=True)  # type: ignore[arg-type]
        return torch.cat(logps), torch.cat(entropies)

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
    model = load_model(path)
    return Policy(model, load_tokenizer(path), config, device)


def load_tokenizer(path: str | Path) -> Any:
    from transformers import AutoTokenizer

    with _loading(path, "model.path"):
        return AutoTokenizer.from_pretrained(path)


def load_model_config(path: str | Path) -> Any:
    from transformers import AutoConfig

    with _loading(path, "model.path"):
        return AutoConfig.from_pretrained(path)


def load_model(path: str | Path, key: str = "model.path") -> Any:
    """In FP32, complete or not at all; `key` is what errors call `path`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would garble the run's own progress line
    with _loading(path, key):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            # transformers would go on with random numbers in their place.
            raise ValueError(f"the weights lack {', '.join(missing[:3])}")
    return model


@contextmanager
def _loading(path: str | Path, key: str) -> Iterator[None]:
    # A folder, or a name on the hub: `owner/name`.
    may_be_hub_name = str(path).count("/") <= 1 and not str(path).startswith((".", "/", "~"))
    if not Path(path).exists() and not may_be_hub_name:
        raise ModelError(f"{key} = {str(path)!r} does not exist (seen from {Path.cwd()})")
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"{key} = {str(path)!r} cannot be loaded as a causal LM; give a folder with "
            "config.json, weights and tokenizer, or a hub name that is reachable from here: "
            f"{error}"
        ) from error


def make_savable_(model: Any) -> None:
    """Repair sampling defaults that transformers reads but refuses to write."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True


def hidden_states(
    model: nn.Module, token_ids: Tensor, compute_dtype: torch.dtype, **options: Any
) -> Tensor:
    """[B, T, H]: the backbone's output after its last norm, without the head."""
    with autocast(token_ids.device, compute_dtype):
        output = model.base_model(input_ids=token_ids, use_cache=False, **options)  # type: ignore[operator]
    return output.last_hidden_state


def apply_head(model: nn.Module, states: Tensor) -> Tensor:
    """[N, V]: what the model's own forward makes of hidden states."""
    config: Any = model.config
    logits = model.get_output_embeddings()(states) * logit_scale(config)  # type: ignore[operator]
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


def _pack_forwards_(model: Any, compute_dtype: torch.dtype) -> str | None:
    """Let the model take packed sequences; where it cannot, leave it as it is and say why."""
    own = model.config._attn_implementation
    try:
        use_packed_attention_(model)
        for dtype in {torch.float32, compute_dtype}:
            _check_packing(model, dtype)
    # What a model makes of keywords that it does not know is its own affair, errors included.
    except Exception as error:
        model.set_attn_implementation(own)
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        return f"{type(model).__name__} cannot be given packed ones ({kind}{error})"
    return None


@torch.no_grad()
def _check_packing(model: Any, compute_dtype: torch.dtype) -> None:
    """Refuse a model that computes other states from packed sequences than from padded ones."""
    embedding = model.get_input_embeddings()
    ids = torch.arange(14, device=embedding.weight.device).view(2, 7) % embedding.num_embeddings
    packed = Packed.of(ids, [7, 4])
    padded = hidden_states(model, ids, compute_dtype).flatten(0, 1)[packed.places].float()
    states = hidden_states(model, packed.token_ids[None], compute_dtype, **packed.options)[0]
    gap = float((states.float() - padded).norm(dim=-1).max() / padded.norm(dim=-1).max())
    if not gap < PACKING_BOUNDS[compute_dtype]:
        raise ModelError(
            f"its states differ by {gap:.3g} of their size from those of padded sequences, on two "
            f"test prompts in {compute_dtype}"
        )


def compile_layers_(model: nn.Module) -> None:
    """Compile the decoder layers where they are called; weights, names and saving stay the same.

    Layers of one kind share what is compiled for the first of them, and lengths are dynamic.
    """
    layers = decoder_layers(model)
    if not len(layers):
        raise ModelError(
            f"model.compile = true, but {type(model).__name__} has no list of decoder layers"
        )
    for layer in layers:
        layer.compile(dynamic=True)


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
        return default_dtype(device)
    return getattr(torch, config.compute_dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
