"""The aliases of `fewbytes.base.ranges`, where methods find them."""

from fewbytes.base.ranges import BelowOne, Count, NotNegative, Positive, Several, Share, UpToOne, Whole, wrong

__all__ = ["BelowOne", "Count", "NotNegative", "Positive", "Several", "Share", "UpToOne", "Whole", "wrong"]
