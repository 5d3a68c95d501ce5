"""Qwen3-Omni: mixtures of experts think and talk, and a code predictor completes the frames."""
