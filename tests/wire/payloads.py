"""Payloads of one wire value each, for the tests of the wire and of its stored frames."""

from __future__ import annotations

from fewbytes.wire import Bits, Images, Packages, Quantised, Signs, TopK, payload


@payload
class Album:
    images: Images


@payload
class Choice:
    bits: Bits


@payload
class Rounded:
    model: Quantised


@payload
class Few:
    model: TopK


@payload
class Parcel:
    model: Packages


@payload
class Directions:
    model: Signs
