"""Qwen-Image: pictures of text. With a checkpoint of Qwen-Image-Edit: pictures of text and other pictures.

Guidance is made by a second pass with a negative prompt, where a request gives one (it may be empty) and the
scale is above 1.
"""
