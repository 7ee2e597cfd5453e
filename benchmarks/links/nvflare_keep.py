"""A filter of NVFlare's server that changes nothing and keeps the model of each round, before it is quantised."""

from __future__ import annotations

from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from task import keep


class Keeper(Filter):
    """Keeps what the first site is sent."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The same message."""
        if fl_ctx.get_peer_context().get_identity_name() == "site-1":
            keep(from_shareable(shareable).data, int(shareable.get_header(AppConstants.CURRENT_ROUND, 0)))
        return shareable
