"""QuRL's plug-in for vLLM: INT8 linear layers, and a receiver that checks the weights it gets.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`), so that

    vllm.LLM(model, quantization="qurl_int8")

quantizes any dense model to W8A8 while it loads, and again at each weight update. `qurl_codes`
takes codes and scales instead, `name.weight` and `name.weight_scale`, half the bytes of BF16.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from qurl.errors import SyncError
from qurl.quant import quantize
from qurl.quant.shipment import mismatches

_PROBE_STEP = 7919
"""A prime, so that the rows that are read back are others at each version."""


def register() -> None:
    """Make vLLM know our methods and our receiver; once or many times, in any order."""
    register_quantization_config("qurl_codes")(CodesConfig)
    register_quantization_config("qurl_int8")(OnlineConfig)
    with suppress(ValueError):  # vLLM's word for a name that it knows already
        WeightTransferEngineFactory.register_engine("qurl", Receiver)


# --- INT8 linear layers -------------------------------------------------------------------------


class CodesMethod(LinearMethodBase):
    """W8A8 with codes and scales that come from outside."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        self._is_cut = input_size != input_size_per_partition
        layer.logical_widths = output_partition_sizes
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )
        for name in ("input_scale", "input_zero_point", "azp_adj"):  # the kernel looks for them
            layer.register_parameter(name, None)
        self._register(layer, shape, params_dtype, attributes["weight_loader"])

    def _register(self, layer: nn.Module, shape: Any, dtype: torch.dtype, loader: Any) -> None:
        codes = torch.empty(shape, dtype=torch.int8)
        scale = torch.empty(shape[0], 1, dtype=torch.float32)  # vLLM's default dtype is the model's
        weight = ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=loader)
        scales = ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scales)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.kernel.process_weights_after_loading(layer)
        # oneDNN keeps the address of these scales, and a reload puts others in their place.
        self._scale = layer.weight_scale

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)


class OnlineMethod(CodesMethod):
    """W8A8 of weights that come in full precision and are coded as they are loaded."""

    uses_meta_device = True

    def _register(self, layer: nn.Module, shape: Any, dtype: torch.dtype, loader: Any) -> None:
        data = torch.empty(shape, dtype=dtype, device="meta")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = layer.weight.detach()
        # The scale of a row is that of the whole row, of which this rank may have a part only.
        largest = weight.abs().amax(1, keepdim=True)
        if self._is_cut:
            group = get_tp_group().device_group
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        coded = quantize(torch.cat([weight, largest], 1), "int8")
        for name, data in (
            ("weight", coded.codes[:, :-1].contiguous()),
            ("weight_scale", coded.scale),
        ):
            layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
        super().process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True


class CodesConfig(QuantizationConfig):
    """All linear layers but the head."""

    name, method = "qurl_codes", CodesMethod

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CodesConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> CodesMethod | None:
        return self.method() if isinstance(layer, LinearBase) else None


class OnlineConfig(CodesConfig):
    name, method = "qurl_int8", OnlineMethod


# --- weight updates -----------------------------------------------------------------------------


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A chunk of a shipment (`qurl.quant.shipment`)."""

    version: int
    checksums: dict[str, list[int]]
    weights: dict[str, Tensor] = field(default_factory=dict)
    """From the same process."""
    path: str = ""
    """A file of them, from another process."""
    is_last: bool = False
    """Nothing comes after it: check what the weights became."""


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads chunks by vLLM's layerwise reload, and refuses what arrived or was loaded wrongly."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        self._missing = {name for name, _ in self.model.named_parameters()}
        self._rows: dict[str, tuple[int, int, Tensor]] = {}
        """By name: how many rows there are, the one to read back, and what is in it."""
        self._version: int | None = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._version = version = update_info.version
        weights = load_file(update_info.path) if update_info.path else update_info.weights
        if wrong := mismatches(weights, update_info.checksums):
            self._finalize()
            raise SyncError(
                f"sync of version {version} failed: {wrong[0]} and {len(wrong) - 1} more tensors "
                "did not arrive as they were sent"
            )
        for name, weight in weights.items():
            if weight.dim() > 0:
                row = _PROBE_STEP * version % len(weight)
                self._rows[name] = (len(weight), row, weight[row].clone())
        loaded = self.model.load_weights(weights.items())
        self._missing = set() if loaded is None else self._missing - loaded
        # Not in `finish_weight_update`: vLLM would take an update that fails there for active.
        if update_info.is_last:
            self._finalize()
            self._check_loaded()

    def finish_weight_update(self) -> None:
        self._finalize()

    def _check_loaded(self) -> None:
        """Raise unless all parameters got weights, and those that can be compared got these."""
        if self.model_config.hf_text_config.tie_word_embeddings:
            self._missing.discard("lm_head.weight")
        if self._missing:
            raise SyncError(
                f"sync of version {self._version} failed: vLLM loaded no weights into "
                f"{min(self._missing)} and {len(self._missing) - 1} more parameters"
            )
        if self.parallel_config.tensor_parallel_size == 1:
            self._read_back()

    def _finalize(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def _read_back(self) -> None:
        """Compare a row of each tensor with what it became, where vLLM keeps it as it was sent."""
        parameters = dict(self.model.named_parameters())
        for name, (_, row, sent) in self._rows.items():
            stored = self._find_row(parameters, name, row)
            if stored is None or stored.shape != sent.shape or stored.dtype != sent.dtype:
                continue
            bits = [x.contiguous().view(-1).view(torch.uint8).cpu() for x in (stored, sent)]
            if not torch.equal(*bits):  # as bits, since NaN is not equal to itself
                raise SyncError(
                    f"sync of version {self._version} failed: row {row} of {name} in vLLM is not "
                    "what was sent"
                )

    def _find_row(self, parameters: dict[str, nn.Parameter], name: str, row: int) -> Any:
        """Row of a tensor, which may be stacked with others; None if it is not to be found."""
        parameter, start = parameters.get(name), 0
        owner, _, leaf = name.rpartition(".")
        parent, _, part = owner.rpartition(".")
        for stack, parts in getattr(self.model, "packed_modules_mapping", {}).items():
            if parameter is None and part in parts:
                parameter = parameters.get(f"{parent}.{stack}.{leaf}")
                before = parts[: parts.index(part)]
                start = sum(self._rows.get(f"{parent}.{p}.{leaf}", (0,))[0] for p in before)
        if parameter is None or parameter.dim() == 0:
            return None
        # Kernels for codes want them transposed.
        is_transposed = parameter.dtype == torch.int8 and parameter.stride(0) == 1
        stored = parameter.data.T if is_transposed else parameter.data
        return stored[start + row] if start + row < len(stored) else None

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM 0.25, gone later: `qurl.rollout.vllm` sends by `update_weights`."""
        raise NotImplementedError("send weights by qurl.rollout.vllm.VllmEngine.sync")
