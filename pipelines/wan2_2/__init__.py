"""Wan 2.2: films of text, and of text and a first picture, in three or four stages."""
