"""Qwen3-Omni: thinker and talker are mixtures of experts, a code predictor makes the other codebooks of a frame."""
