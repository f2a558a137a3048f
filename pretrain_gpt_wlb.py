#!/usr/bin/env python3
"""Trains a GPT with Megatron-Core, with every flag of its own GPT script and the `--wlb-*` flags.

torchrun ... pretrain_gpt_wlb.py <flags of pretrain_gpt.py> --wlb-packing
"""

if __name__ == "__main__":
    # Megatron's checkpoint writers may start processes that import this file again.
    from megatron.wlb.trainer import main

    main()
