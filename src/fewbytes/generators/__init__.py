"""Pre-trained image generators for a server's training: latent vectors to images."""

from fewbytes.generators.load import load_generator
from fewbytes.generators.protocol import ConditionalGenerator, ImageGenerator

__all__ = ["ConditionalGenerator", "ImageGenerator", "load_generator"]
