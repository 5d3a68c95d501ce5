"""GLM-Image: a language model writes a picture's codes, and a diffusion transformer draws by them."""
