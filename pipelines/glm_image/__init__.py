"""GLM-Image: pictures of text, in four stages."""
