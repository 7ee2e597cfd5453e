"""A pair of NVFlare filters: a model and the clients' results in few bytes, lossless or rounded with error feedback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_copy
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from nvflare.app_common.app_constant import AppConstants
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.spec import Recipe
from torch import nn

from fewbytes.base.encoded import out_of
from fewbytes.base.errors import FrameError, UserError, with_article
from fewbytes.base.files import replacing
from fewbytes.codec import Encoder, Stream
from fewbytes.codec.coder import check_bits
from fewbytes.nvflare.ends import FIRST, ClientEnd, Order, ServerEnd, digest_of
from fewbytes.nvflare.messages import KEY, decoded, dxo_of, encoded, is_encoded, parts_of, weights_of, with_data

END = f"{KEY}.end"
"""The job's property in which the two filters of one end share what it keeps."""
AGAINST = f"{KEY}.against"
"""The header of a result that states whether it is coded against the model that the client was sent."""
EXACT_TASKS = frozenset({AppConstants.TASK_VALIDATION, AppConstants.TASK_SUBMIT_MODEL})
"""Tasks of cross-site evaluation: their models are never rounded, as each is one of several."""
TASKS = (AppConstants.TASK_TRAIN,)
End = TypeVar("End", ServerEnd, ClientEnd)
_LOCK = threading.Lock()


class _ModelFilter(Filter):  # type: ignore[misc]
    """What both filters share."""

    def add_to_fed_job(self, job: FedJob, ctx: Any, **kwargs: Any) -> None:
        """As NVFlare's filters; also keeps this package's source out of the job, as each end has it installed."""
        super().add_to_fed_job(job, ctx, **kwargs)
        job.set_app_packages([*job.job.app_packages, "fewbytes"])

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The message to pass on. Raises FrameError for one that cannot be decoded."""
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME)), str(fl_ctx.get_prop(FLContextKey.TASK_ID))
        try:
            return self._process(shareable, fl_ctx, task)
        except FrameError as error:
            text = f"fewbytes: a message of task {task[0]} cannot be decoded, so the task ends here: {error}"
            self.log_error(fl_ctx, text)
            raise

    def _process(self, shareable: Shareable, fl_ctx: FLContext, task: tuple[str, str]) -> Shareable:
        raise NotImplementedError

    @property
    def _is_of_task_data(self) -> bool:
        return bool(self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN)

    def _done(self, fl_ctx: FLContext, text: str) -> None:
        self.log_info(fl_ctx, f"fewbytes: {text}")
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"applied filter: {type(self).__name__}")


class ModelEncoder(_ModelFilter):
    """Encodes models: on the server as a task data filter, on clients as a task result filter.

    `bits`: how many each value takes, about, as its difference from the model that the other end holds; None is
    lossless. What rounding loses is sent later. `exact`: names of entries that are not rounded (default: statistics of
    normalisation layers, by their names). `feedback`, on the server: whether what rounding lost is sent with the next
    model; give False for a server that takes steps on a model of its own, such as FedOpt. `first`, on the server: the
    network that the job starts from. Clients whose `ModelDecoder` has an equal one are not sent it.

    Without `ModelDecoder` at the other end, messages pass through unchanged.
    """

    def __init__(
        self,
        bits: float | None = None,
        exact: Sequence[str] | None = None,
        feedback: bool = True,
        first: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_bits(bits)
        self.bits, self.exact, self.feedback, self.first = bits, exact, feedback, _checked(first)

    def _process(self, shareable: Shareable, fl_ctx: FLContext, task: tuple[str, str]) -> Shareable:
        bits = None if task[0] in EXACT_TASKS else self.bits
        if self._is_of_task_data:
            return self._to_client(shareable, fl_ctx, task, bits)
        return self._to_server(shareable, fl_ctx, task, bits)

    def _to_client(
        self, shareable: Shareable, fl_ctx: FLContext, task: tuple[str, str], bits: float | None
    ) -> Shareable:
        peer, end = fl_ctx.get_peer_context(), _end(fl_ctx, ServerEnd)
        holds = None if peer is None else peer.get_prop(KEY)
        if not isinstance(holds, dict):
            self.log_debug(fl_ctx, "fewbytes: this client has no ModelDecoder: it gets a plain message")
            return shareable
        client, dxo = peer.get_identity_name(), dxo_of(shareable)
        parts = None if dxo is None else parts_of(dxo.data)
        if dxo is None or parts is None:
            made = make_copy(shareable)
        else:
            first = None if self.first is None else weights_of(self.first)
            if first is not None and not end.first:
                end.first = digest_of(first)
            new = partial(Stream, bits, exact=self.exact, feedback=self.feedback, first=first)
            data = end.encode(client, task, parts.tensors, holds, new)
            made = with_data(shareable, dxo, encoded(data, parts), type(self).__name__)
            self._done(fl_ctx, f"task {task[0]} for {client}: {out_of(len(data), parts.nbytes)}")
        made.set_header(KEY, end.order(client, task[0]).as_header())
        return made

    def _to_server(
        self, shareable: Shareable, fl_ctx: FLContext, task: tuple[str, str], bits: float | None
    ) -> Shareable:
        end, dxo = _end(fl_ctx, ClientEnd), dxo_of(shareable)
        parts = None if dxo is None else parts_of(dxo.data)
        if dxo is None or parts is None or end.order is None or not end.order.decodes:
            return shareable
        new = partial(Encoder, bits, exact=self.exact, averaged=True)
        data, against = end.encode(task, parts.tensors, dxo.data_kind == "WEIGHTS", new)
        made = with_data(shareable, dxo, encoded(data, parts), type(self).__name__)
        made.set_header(AGAINST, against)
        self._done(fl_ctx, f"result of task {task[0]}: {out_of(len(data), parts.nbytes)}")
        return made


class ModelDecoder(_ModelFilter):
    """Decodes what `ModelEncoder` encoded: on clients as a task data filter, on the server as a task result filter.

    A message that cannot be decoded ends its task with an error, and the server sends that client the whole model next.
    `first`, on clients: the network that the job starts from, if the server's `ModelEncoder` has it as well: if it is
    equal bit for bit, it is not sent.
    """

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = _checked(first)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """When the job starts, make known that this end can decode."""
        if not self._is_of_task_data:
            if event_type == EventType.START_RUN:
                _end(fl_ctx, ServerEnd).decodes = True
            return
        end = _end(fl_ctx, ClientEnd)
        if event_type in (EventType.START_RUN, EventType.SWAP_IN) and self.first is not None:
            end.first = weights_of(self.first)
        if event_type == EventType.SWAP_IN:
            self._swap_in(fl_ctx, end)
        elif event_type == EventType.AFTER_SEND_TASK_RESULT and end.swaps:
            with replacing(_file(fl_ctx)) as written:
                written.write(end.state())
        if event_type in (EventType.START_RUN, EventType.SWAP_IN):
            self._report(fl_ctx, end)

    @staticmethod
    def _swap_in(fl_ctx: FLContext, end: ClientEnd) -> None:
        """NVFlare's simulator with fewer threads than clients kills a client's process after each task (often before
        SWAP_OUT has been handled): so save after each task what this end keeps, and load it here."""
        end.swaps = True
        if not end.holds().keys() - {FIRST} and _file(fl_ctx).exists():
            with contextlib.suppress(FrameError):  # without it, the next model comes whole
                end.load(_file(fl_ctx).read_bytes())

    def _process(self, shareable: Shareable, fl_ctx: FLContext, task: tuple[str, str]) -> Shareable:
        if self._is_of_task_data:
            return self._from_server(shareable, fl_ctx, task)
        return self._from_client(shareable, fl_ctx, task)

    def _from_server(self, shareable: Shareable, fl_ctx: FLContext, task: tuple[str, str]) -> Shareable:
        end, dxo = _end(fl_ctx, ClientEnd), dxo_of(shareable)
        end.begin(Order.of_header(shareable.get_header(KEY)))
        if dxo is None or not is_encoded(dxo.data):
            return shareable
        try:
            data = decoded(dxo.data, end.decode(task[0], dxo.data[KEY]))
        finally:
            self._report(fl_ctx, end)
        return with_data(shareable, dxo, data, type(self).__name__)

    def _from_client(self, shareable: Shareable, fl_ctx: FLContext, task: tuple[str, str]) -> Shareable:
        dxo = dxo_of(shareable)
        if dxo is None or not is_encoded(dxo.data):
            return shareable
        client, against = fl_ctx.get_peer_context().get_identity_name(), shareable.get_header(AGAINST) is True
        tensors = _end(fl_ctx, ServerEnd).decode(client, task[1], dxo.data[KEY], against)
        return with_data(shareable, dxo, decoded(dxo.data, tensors), type(self).__name__)

    @staticmethod
    def _report(fl_ctx: FLContext, end: ClientEnd) -> None:
        """State what this client holds: NVFlare sends public properties with each request."""
        fl_ctx.set_prop(KEY, end.holds(), private=False, sticky=True)


def add_filters(
    job: Recipe | FedJob,
    up: float | None = None,
    down: float | None = None,
    *,
    exact: Sequence[str] | None = None,
    feedback: bool = True,
    first: nn.Module | None = None,
    tasks: Sequence[str] = TASKS,
) -> None:
    """Add the filters to both ends of a recipe or job. `up`, `down`: `bits` of clients' results and of the server's
    models; the rest as in `ModelEncoder`. `tasks`: the names of tasks whose messages are encoded.

    `first`: the network that the job starts from, which each end makes again from its class and arguments, as NVFlare
    makes a recipe's model. A client that makes an equal one is not sent it."""
    to_client, at_client = ModelEncoder(down, exact, feedback, first), ModelDecoder(first)
    to_server = ModelEncoder(up, exact)
    names = list(tasks)
    if isinstance(job, Recipe):
        job.add_server_output_filter(to_client, tasks=names)
        job.add_client_input_filter(at_client, tasks=names)
        job.add_client_output_filter(to_server, tasks=names)
        job.add_server_input_filter(ModelDecoder(), tasks=names)
    else:
        job.to_server(to_client, filter_type=FilterType.TASK_DATA, tasks=names)
        job.to_clients(at_client, filter_type=FilterType.TASK_DATA, tasks=names)
        job.to_clients(to_server, filter_type=FilterType.TASK_RESULT, tasks=names)
        job.to_server(ModelDecoder(), filter_type=FilterType.TASK_RESULT, tasks=names)


def _checked(first: nn.Module | None) -> nn.Module | None:
    if first is not None and not isinstance(first, nn.Module):
        raise UserError(f"first must be the network that the job starts from, not {with_article(type(first))}")
    return first


def _end(fl_ctx: FLContext, kind: type[End]) -> End:
    """What this end of the job keeps."""
    with _LOCK:
        end = fl_ctx.get_prop(END)
        if not isinstance(end, kind):
            end = kind()
            fl_ctx.set_prop(END, end, private=True, sticky=True)
        return end


def _file(fl_ctx: FLContext) -> Path:
    """Where a client's end is saved: in the job's folder at this site."""
    return Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_run_dir(fl_ctx.get_job_id())) / f"{KEY}.state"
