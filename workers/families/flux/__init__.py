"""FLUX.1: pictures of text.

The guidance scale of the distilled model ("dev") is an input of the transformer. A second pass with a
negative prompt is made where a request gives both that and a ``true_cfg_scale`` above 1.
"""
