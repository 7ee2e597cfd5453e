"""Pre-trained image generators that a server learns from: latent vectors to images."""

from fewbytes.generators.load import ImageGenerator, load_generator

__all__ = ["ImageGenerator", "load_generator"]
