"""Tensors between hosts: data servers that send blocks, and fetchers that pull them."""
