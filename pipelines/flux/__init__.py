"""FLUX.1: pictures of text, in three stages."""
