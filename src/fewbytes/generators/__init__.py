"""Pre-trained image generators that a server learns from: latent vectors to images."""

from fewbytes.generators.load import load_generator
from fewbytes.generators.protocol import ConditionalGenerator, ImageGenerator

__all__ = ["ConditionalGenerator", "ImageGenerator", "load_generator"]
