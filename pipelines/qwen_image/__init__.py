"""Qwen-Image: pictures of text, and of text and other pictures."""
