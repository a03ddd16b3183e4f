"""FusionML: faster prompts for MLX-LM, on the CPU and the GPU at once."""
