"""Qwen2.5-Omni: text, speech, pictures and films in, text and speech out."""
