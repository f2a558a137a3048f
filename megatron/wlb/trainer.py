"""Arguments -> patches applied -> megatron.training.pretrain."""

from __future__ import annotations

from megatron.wlb.cpu import cpu_as_device
from megatron.wlb.patches import compile_helpers
from megatron.wlb.patches.registry import applied


def main() -> None:
    """Train as the command line says."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron.wlb import stock

    with cpu_as_device(), applied([compile_helpers.PATCH]):
        args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
        stock.check_supported(args)
        provider = stock.dataset_provider(args)
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(
            config,
            provider,
            ModelType.encoder_or_decoder,
            stock.forward_step(args),
        )
