"""The trained model: a transformers causal LM with FP32 master weights or adapters.

Forwards are packed, so no padding is computed (`qurl.trainer.packing`). Log-probs and entropies
come from chunks of tokens, so [B, T, V] never exists (`qurl.trainer.head`).
Shapes: B sequences, T positions, H hidden.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qurl.config import ModelConfig
from qurl.config.schema import QuantConfig
from qurl.errors import ModelError
from qurl.ops.device import default_dtype
from qurl.quant.coded_linear import code_base_
from qurl.quant.linear import EngineCodes
from qurl.trainer.folder import check_folder, refuse_adapters
from qurl.trainer.head import Scoring, apply_head, autocast, score_tokens
from qurl.trainer.lora import (
    adapters,
    add_adapters_,
    base_of,
    load_adapters_,
    merge_adapters_,
    save_adapters,
    without_adapters,
)
from qurl.trainer.packing import BatchLayout, Packed, try_attention, use_packed_attention_
from qurl.trainer.unified import unify_
from qurl.trainer.weight_files import (
    LARGEST_WEIGHT,
    NO_WEIGHTS,
    UNREADABLE,
    describe_broken,
    describe_empty,
)
from qurl.types import Batch

PLAIN = QuantConfig(format="none")
"""Policies compute in full precision unless `unified` is set."""
PACKING_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest relative difference between packed and padded states; in BF16 rounding grows."""


class TokenScores(NamedTuple):
    """Results of a forward per token; 0 where the batch's mask is 0."""

    logp: Tensor  # [B, T]
    entropy: Tensor  # [B, T]


class Scorer(nn.Module):
    """The forward that is trained.

    It is a module, so that the weights of a sharded model are gathered around all that reads them.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.config, self.compute_dtype = model, config, compute_dtype

    def forward(
        self, layout: BatchLayout, temperature: float, needs_entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [M] and entropies [M] of the scored tokens."""
        hidden = hidden_states(self.model, layout.token_ids, self.compute_dtype, **layout.options)
        scoring = Scoring(
            temperature,
            self.config.logits_chunk,
            self.compute_dtype,
            needs_entropy_grad,
            self.config.keep_logits,
        )
        return score_tokens(self.model, layout.before(hidden), layout.targets, scoring)


class Policy:
    """pi_theta: loads, scores tokens, saves as a normal Hugging Face folder."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        config: ModelConfig,
        device: torch.device,
        quant: QuantConfig = PLAIN,
        *,
        is_sharded: bool = False,
    ) -> None:
        """`is_sharded`: weights stay in main memory until ranks share them (`parallel.sharding`).

        Their layers are not fused: fused ones keep copies of whole weights.
        """
        if config.has_coded_base:  # before it takes the device's memory
            code_base_(model, config.base, device)
            for parameter in model.parameters():
                parameter.data = parameter.data.float()
        self.model = model if is_sharded else model.to(device)
        self.tokenizer = tokenizer
        self.device = device
        name = config.compute_dtype
        self.compute_dtype = default_dtype(device) if name == "auto" else getattr(torch, name)
        disable_dropout_(self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            # For reentrant ones alone, and a hook that no other process can be sent.
            self.model.disable_input_require_grads()  # type: ignore[operator]
            self.model.train()
        _check_head(self.model)
        empty = [name for name, weight in model.named_parameters() if not bool(weight.any())]
        notes = [note] if (note := describe_empty(empty)) else []
        # A compiler fuses by itself.
        self.is_fused = device.type == "cuda" and not (is_sharded or config.compile)
        if self.is_fused:
            from qurl.trainer.layers import fuse_layers_  # needs Triton

            if not fuse_layers_(self.model):
                kind = type(self.model).__name__
                notes.append(f"{kind} is trained without fused kernels; model.compile may help")
        obstacle = _pack_forwards_(self.model, self.compute_dtype, device)
        self.is_packed = obstacle is None
        if obstacle is not None:
            notes.append(f"sequences are padded for training: {obstacle}")
        self.notes: tuple[str, ...] = tuple(notes)  # warnings for the user
        self.is_compiled = config.compile
        if config.compile:
            compile_layers_(self.model)
        if quant.unified:  # last: the checks above compare in full precision
            self._unify(quant)
        self.scorer = Scorer(self.model, config, self.compute_dtype)

    def _unify(self, quant: QuantConfig) -> None:
        if self.is_fused:
            from qurl.trainer.layers import unify_layers_

            if unify_layers_(self.model, quant, self.compute_dtype):
                return
        if quant.kv != "none" and not self.is_packed:
            raise ModelError(
                "quant.unified = true rounds keys and values of packed sequences only; set "
                f"quant.kv = 'none' ({self.notes[-1]})"
            )
        unify_(self.model, quant, self.compute_dtype)

    def adopt_codes_(self, buffers: Sequence[EngineCodes]) -> None:
        """Share one set of codes with an engine on this device, where the layers are fused."""
        if self.is_fused:
            from qurl.trainer.layers import adopt_codes_

            adopt_codes_(self.model, buffers)

    def free_copies_(self) -> None:
        """Free the weights in compute precision, until the next forward."""
        if self.is_fused:
            from qurl.trainer.layers import forget_copies_

            forget_copies_(self.model)

    def layout(self, batch: Batch) -> BatchLayout:
        """How this policy's forwards see a batch. On a GPU the host waits here, not in `score`."""
        return BatchLayout.of(batch, is_packed=self.is_packed)

    def score(
        self, batch: Batch, layout: BatchLayout | None = None, *, needs_entropy_grad: bool = False
    ) -> TokenScores:
        """log pi_theta and entropy of each response token, at the batch's temperature."""
        layout = layout or self.layout(batch)
        scores = self.scorer(layout, batch.temperature, needs_entropy_grad)
        return TokenScores(*(layout.spread(values) for values in scores))

    def adapt_(self, config: ModelConfig, seed: int) -> Policy:
        """Train low-rank adapters from here on, and not the weights."""
        refuse_adapters(str(self.model.name_or_path))
        add_adapters_(
            self.model, config.lora_rank, config.lora_alpha, seed, dtype=self.compute_dtype
        )
        return self

    def freeze_(self) -> Policy:
        """Make this a reference, never to be trained."""
        self.model.requires_grad_(False).eval()
        return self

    def twin(self) -> Policy:
        """Another policy on the same memory, never to be trained; this one may be moved."""
        shared: dict[int, Any] = {id(buffer): buffer.detach() for buffer in self.model.buffers()}
        for weight in self.model.parameters():
            shared[id(weight)] = nn.Parameter(weight.detach(), requires_grad=False)
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model, shared)
        twin.device = next(twin.model.parameters()).device
        twin.scorer = Scorer(twin.model, self.scorer.config, self.compute_dtype)
        return twin.freeze_()

    def save(self, folder: Path) -> None:
        if any(adapters(self.model)):
            save_adapters(self.model, folder)
        else:
            self.model.save_pretrained(folder)  # type: ignore[operator]
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


class Untrained:
    """A policy without its adapters, the reference of a KL that costs no memory."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.is_packed = policy, policy.is_packed

    def score(self, batch: Batch, layout: BatchLayout | None = None) -> TokenScores:
        with without_adapters(self.policy.model):
            return self.policy.score(batch, layout)


def load_policy(
    path: str | Path,
    config: ModelConfig,
    device: torch.device,
    quant: QuantConfig = PLAIN,
    **options: bool,
) -> Policy:
    # What is coded need not be FP32 before: 32B would take 131 GB of main memory.
    model = load_model(path, is_narrow=config.has_coded_base)
    return Policy(model, load_tokenizer(path), config, device, quant, **options)


def load_trained_policy(path: str | Path, config: ModelConfig, device: torch.device) -> Policy:
    """A policy as a run saved it: adapters of a base in codes stay beside it."""
    if not config.has_coded_base or base_of(path) == path:
        return load_policy(path, config, device)
    policy = load_policy(base_of(path), config, device).adapt_(config, seed=0)
    load_adapters_(policy.model, Path(path))
    return policy


def load_tokenizer(path: str | Path, *, retries_hub: bool = True) -> Any:
    """The tokenizer of a model, which must turn a text into tokens."""
    from transformers import AutoTokenizer

    with _loading(path, "model.path", "tokenizer"):
        options = {} if retries_hub else _ask_hub_once(path)
        # Without the False, transformers would ask on the terminal whether it may run its code.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
        if not tokenizer("6*7=").input_ids:
            raise ValueError("its tokenizer makes no tokens of '6*7='")
    return tokenizer


def load_model_config(path: str | Path, *, retries_hub: bool = True) -> Any:
    from transformers import AutoConfig

    with _loading(path, "model.path"):
        base = base_of(path)
        options = {} if retries_hub else _ask_hub_once(base)
        return AutoConfig.from_pretrained(base, trust_remote_code=False, **options)


def load_empty_model(path: str | Path) -> Any:
    """A model on the meta device, to plan with: its shapes, and no weights."""
    from transformers import AutoModelForCausalLM

    config = load_model_config(path, retries_hub=False)
    with _loading(path, "model.path"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )


def load_model(path: str | Path, key: str = "model.path", *, is_narrow: bool = False) -> Any:
    """A causal LM of transformers, in FP32, with all its weights; `key` is what errors name.

    `is_narrow` leaves weights in the dtype of their files. A folder of adapters gives the model
    that they are for, with them merged into its weights, always in FP32.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would garble the run's own progress line
    with _loading(path, key, "weights"):
        base = base_of(path)
        load: Any = AutoModelForCausalLM.from_pretrained
        options: dict[str, Any] = {"output_loading_info": True, "trust_remote_code": False}
        options["dtype"] = torch.float32
        if is_narrow and base == path:
            # The dtype that a config names may be another than that of the files.
            config = load_model_config(path)
            config.dtype = None
            options |= {"config": config, "dtype": "auto"}
        model, info = load(base, **options)
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"the weights lack {', '.join(missing[:3])}")
        merge_adapters_(model, path)
        model.name_or_path = str(path)
    _make_savable_(model)
    for name, weight in model.named_parameters():
        if not bool((weight.abs() < LARGEST_WEIGHT).all()):
            raise ModelError(describe_broken(f"{key} = {str(path)!r}", name))
    return model


def _ask_hub_once(path: str | Path) -> dict[str, Any]:
    """Options for transformers: without a network, it takes what is cached and does not wait.

    By itself it asks for each file that is not cached six times, for half a minute. A run should
    survive a short outage like that; commands that only plan need not.
    """
    return {} if os.path.exists(path) or hub_answers(str(path)) else {"local_files_only": True}


@functools.cache
def hub_answers(name: str) -> bool:
    """Whatever the answer is: transformers explains it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, ValueError):  # an answer that is an error; no name of the hub's
        return True
    except Exception:  # of its HTTP library, which depends on its version
        return False
    return True


@contextmanager
def _loading(path: str | Path, key: str, *needs: str) -> Iterator[None]:
    check_folder(path, key, needs=needs)
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # The tokenizers library raises the plain class, huggingface_hub its own.
        is_plain = type(error) is Exception or type(error).__module__.startswith("huggingface_hub")
        if not isinstance(error, UNREADABLE) and not is_plain:
            raise
        raise ModelError(
            f"{key} = {str(path)!r} cannot be loaded as a causal LM; give a folder with "
            "config.json, weights and tokenizer, or a hub name that is reachable from here: "
            f"{_explain(error)}"
        ) from error


def _explain(error: Exception) -> str:
    """The reason, without advice that does not apply here."""
    if "trust_remote_code" in str(error):
        return (
            "it brings Python code of its own, which is never run here; use a model whose "
            "architecture is part of transformers"
        )
    if "couldn't connect to" in str(error):  # the files are not in its cache, either
        return "there is no such folder, and this machine cannot connect to the hub"
    if "weights_only" in str(error):
        return f"of its .bin file: {NO_WEIGHTS}"
    if isinstance(error, KeyError):
        return f"KeyError: {error}"
    if "ignore_mismatched_sizes" in str(error):
        return "the shapes of its weights are not those that its config.json gives"
    kept = [line for line in str(error).splitlines() if line.strip() and "frame #" not in line]
    return "\n".join(kept[:12]) or type(error).__name__


def _make_savable_(model: Any) -> None:
    """Repair sampling defaults that transformers loads but refuses to save."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True


def hidden_states(
    model: nn.Module, token_ids: Tensor, compute_dtype: torch.dtype, **options: Any
) -> Tensor:
    """The backbone's output [B, T, H], after its last norm and before the head."""
    with autocast(token_ids.device, compute_dtype):
        output = model.base_model(input_ids=token_ids, use_cache=False, **options)  # type: ignore[operator]
    return output.last_hidden_state


@torch.no_grad()
def _check_head(model: nn.Module) -> None:
    """Refuse a model whose logits are not what `apply_head` computes."""
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    ours = apply_head(model, hidden_states(model, ids, torch.float32)).float()
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    if not bool(theirs.isfinite().all()):
        raise ModelError(
            f"the logits of {type(model).__name__} are not finite on a test prompt: its weights "
            "are damaged; use another copy"
        )
    gap = float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max())
    if not gap < 1e-3:
        raise ModelError(
            f"{type(model).__name__} computes its logits in a way that is not known here (largest "
            f"log-prob difference {gap:.3g} on a test prompt); it cannot be trained"
        )


def _pack_forwards_(model: Any, compute_dtype: torch.dtype, device: torch.device) -> str | None:
    """Make the model take packed sequences; if it cannot, leave it as it is and return why.

    `device` is where it will be trained, if it is not there yet.
    """
    own = model.config._attn_implementation
    try:
        use_packed_attention_(model)
        for dtype in {torch.float32, compute_dtype}:
            _check_packing(model, dtype)
        if next(model.parameters()).device.type != device.type:
            try_attention(model, device, compute_dtype)
    # A model may fail in any way on keywords that it does not know.
    except Exception as error:
        model.set_attn_implementation(own)
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        return f"{type(model).__name__} cannot be given packed ones ({kind}{error})"
    return None


@torch.no_grad()
def _check_packing(model: Any, compute_dtype: torch.dtype) -> None:
    """Refuse a model whose states of packed sequences differ from those of padded ones."""
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


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of a causal LM or of its backbone; an empty list if it has none."""
    layers = getattr(getattr(model, "base_model", model), "layers", None)
    if isinstance(layers, nn.ModuleList):
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def compile_layers_(model: nn.Module) -> None:
    """Compile the decoder layers in place; layers of one kind share the compiled code."""
    layers = decoder_layers(model)
    if not len(layers):
        raise ModelError(
            f"model.compile = true, but {type(model).__name__} has no list of decoder layers"
        )
    for layer in layers:
        layer.compile(dynamic=True)


def disable_dropout_(model: nn.Module) -> None:
    """Turn off dropout: the proximal policy and the first update must be the same function."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):  # for F.dropout
                setattr(module, name, 0.0)
