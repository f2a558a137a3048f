"""Everything of this project that imports Megatron-Core. Beside the installed `megatron`, never over it."""
