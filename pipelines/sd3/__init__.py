"""Stable Diffusion 3 and 3.5: text encoders, a denoiser and a VAE."""
