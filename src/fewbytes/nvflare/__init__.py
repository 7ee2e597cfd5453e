"""The codec in anybody's NVFlare job: a pair of filters. Nothing else imports nvflare."""

from fewbytes.base.extras import needs

needs("NVFlare", "nvflare", "nvflare")
