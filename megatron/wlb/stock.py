"""Plain Megatron: the data set, batches and loss of a run with none of our flags.

The wheel of megatron-core ships its training loop but not `pretrain_gpt.py`, so the three functions that the
loop asks of a GPT script are here, each a thin call of megatron.core.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training.global_vars import get_timers, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.wlb.parallel import BatchSource
from wlb.errors import ConfigError

_MODEL_INPUTS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def check_supported(args: Namespace) -> None:
    """Refuse by name what upstream's GPT script reads through code that the wheel does not ship.

    Raises:
        ConfigError: one of those options is on.
    """
    unsupported = {
        "--sft": getattr(args, "sft", False),
        "--fim-data": getattr(args, "fim_data", False),
        "--hybrid-context-parallel": getattr(args, "hybrid_context_parallel", False),
        "--dataloader-inter-document-masking": getattr(args, "dataloader_inter_document_masking", False),
        "--hybrid-layer-pattern": getattr(args, "hybrid_layer_pattern", None) is not None,
    }
    for flag, on in unsupported.items():
        if on:
            raise ConfigError(
                f"{flag} must be off in pretrain_gpt_wlb.py, got on: it needs code outside the megatron-core wheel"
            )


def dataset_provider(args: Namespace) -> Callable[..., tuple[Any, Any, Any]]:
    """The data set provider of `megatron.training.pretrain`: megatron.core's GPTDataset, or its mock."""

    def provide(num_samples: tuple[int, int | None, int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        blend, blend_per_split = get_blend_and_blend_per_split(args)
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=blend,
            blend_per_split=blend_per_split,
            split=args.split,
            multiple_validation_sets=args.multiple_validation_sets,
            full_validation=args.full_validation,
            num_dataset_builder_threads=args.num_dataset_builder_threads,
            path_to_cache=args.data_cache_path,
            mmap_bin_files=args.mmap_bin_files,
            tokenizer=get_tokenizer(),
            reset_position_ids=args.reset_position_ids,
            reset_attention_mask=args.reset_attention_mask,
            eod_mask_loss=args.eod_mask_loss,
            create_attention_mask=args.create_attention_mask_in_dataloader,
            object_storage_cache_path=args.object_storage_cache_path,
            mid_level_dataset_surplus=args.mid_level_dataset_surplus,
            allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        )

        def is_built_on_rank() -> bool:
            here = BatchSource.of_chunk(vp_stage)
            return (here.is_first_stage or here.is_last_stage) and here.tp_rank == 0

        kind = MockGPTDataset if args.mock_data else GPTDataset
        train, valid, test = BlendedMegatronDatasetBuilder(kind, num_samples, is_built_on_rank, config).build()
        return train, valid, test

    # The builder is collective: every rank calls it, also those that read nothing.
    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def forward_step(args: Namespace) -> Callable[..., tuple[torch.Tensor, Callable[..., Any]]]:
    """The forward step of `megatron.training.pretrain` for a batch of equal samples."""

    def step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        batch = _get_batch(args, get_attr_wrapped_model(model, "config"), data_iterator, vp_stage)
        timers("batch-generator").stop()
        tokens, labels, loss_mask, attention_mask, position_ids = (batch[name] for name in _MODEL_INPUTS)
        output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
        return output, partial(masked_loss, loss_mask)

    return step


def masked_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the losses of unmasked tokens, their number, and both for the log.

    The sum goes over the tokens that count before it multiplies, so that a loss of NaN on a padding row does not
    reach the total. Megatron averages: by tokens with --calculate-per-token-loss, by micro-batches without.
    """
    mask = loss_mask.reshape(-1)
    losses = output.float().reshape(-1)
    loss = torch.where(mask > 0, losses * mask, torch.zeros_like(losses)).sum()
    num_tokens = mask.sum().to(torch.int)
    # So small that it changes no count, and a step in which every rank trains nothing logs 0 and not NaN.
    counted = num_tokens.detach().to(loss.dtype).clamp(min=torch.finfo(loss.dtype).tiny)
    reported = torch.stack([loss.detach(), counted])
    return loss, num_tokens, {"lm loss": reported}


def _get_batch(args: Namespace, config: Any, data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    here = BatchSource.of_chunk(vp_stage)
    has_mtp = mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
    batch: dict[str, Any] = dict.fromkeys(_MODEL_INPUTS)
    if not (here.is_first_stage or here.is_last_stage or has_mtp):
        return batch
    if here.tp_rank == 0:
        sample = next(data_iterator)
        batch |= {name: value.cuda(non_blocking=True) for name, value in sample.items() if torch.is_tensor(value)}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=here.tp_source,
        broadcast_group=here.tp_group,
        cp_size=args.context_parallel_size,
        tp_rank=here.tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=here.is_first_stage,
        is_pipeline_last_stage=here.is_last_stage,
    )
    if args.context_parallel_size > 1:
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=here.cp_group)
    return batch
