"""Qwen3-Omni: any input, text and speech out."""
