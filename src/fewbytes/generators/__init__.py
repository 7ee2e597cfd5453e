"""Pre-trained image generators that a server learns from: latent vectors to images."""

from fewbytes.generators.load import load_generator
from fewbytes.generators.protocol import ImageGenerator

__all__ = ["ImageGenerator", "load_generator"]
