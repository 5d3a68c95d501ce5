"""Qwen2.5-Omni: an encoder, a thinker, a talker and a diffusion decoder."""
