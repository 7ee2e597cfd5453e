"""What an author gets wrong in a method of his own is said, and never passed over or blamed on a client."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fewbytes as fb
from fewbytes.base.errors import LikelyMistake
from fewbytes.core.class_checks import likely_mistakes
from fewbytes.core.method import Method
from fewbytes.methods import METHODS
from fewbytes.wire import Dense, payload


@payload
class Model:
    theta: Dense


@payload
class Update:
    theta: Dense
    samples: int


@dataclass
class Server:
    theta: dict[str, torch.Tensor]


@dataclass
class Memory:
    seen: int


@dataclass(frozen=True)
class Plain(fb.Method):
    """FedAvg, in which nothing is wrong."""

    local: fb.Local = fb.Local(epochs=1, lr=0.1, batch=20)

    def server(self, problem) -> Server:
        return Server(problem.first_state())

    def client(self, site: fb.Site) -> Memory:
        return Memory(0)

    def round(self, state, net, t):
        mean = net.mean()
        for _, reply in self.replies(state, net):
            mean.add(reply.theta.dense(), reply.samples)
        state.theta = mean()

    def replies(self, state, net):
        return net.call(self.train, to=net.sample(1.0), send=Model(Dense(state.theta)))

    def train(self, state: Memory, message: Model, site: fb.Site) -> Update:
        model = site.model(message.theta.dense())
        site.fit(model, self.local)
        state.seen += 1
        after = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return Update(Dense(after), len(site.train))

    def global_model(self, state, problem) -> nn.Module | None:
        return problem.first_model(state.theta)


def task() -> fb.Task:
    def client(i: int):
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(i))
        return (x, (x[:, 0] > 0).long()), (x, (x[:, 0] > 0).long())

    return fb.Task.of(lambda: nn.Linear(4, 2), [client(i) for i in range(3)], client(9)[1])


def run(out: Any = None, rounding: dict[str, Any] | None = None, **wrong: Any) -> fb.Result:
    """Plain with other attributes, run for two rounds."""
    for name, value in wrong.items():
        if callable(value):
            value.__name__ = name  # as if it had been written there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LikelyMistake)
        method = dataclass(frozen=True)(type("Mine", (Plain,), wrong))()
        return fb.run(method, task(), rounds=2, workers=1, out=out, **(rounding or {}))


def test_nothing_is_wrong_with_ours():
    assert run().summary["status"] == "done"
    ours = {cls for name in METHODS for cls in METHODS[name].__mro__ if issubclass(cls, Method) and cls is not Method}
    assert [text for cls in ours for text in likely_mistakes(cls, Method)] == []


def misspelt(self, state, problem):
    return None


def rebinds(self, state, net, t):
    state = Server({name: value * 0 for name, value in state.theta.items()})


def restates(self, state: Memory, message: Model, site: fb.Site) -> Update:
    state = Memory(state.seen + 1)
    return Plain.train(self, state, message, site)


def gives_nothing(self, state, problem):
    problem.first_model(state.theta)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"global_modell": misspelt}, "Mine.global_modell means nothing to a run: did you mean global_model?"),
        ({"clients": misspelt}, "Mine.clients means nothing to a run: did you mean client?"),
        (
            {"headline": "personalised"},
            r"Mine.headline means nothing to a run: write promises = Promises\(headline=…\)",
        ),
        ({"local": fb.Local()}, "Mine.local has no type, so it is not a hyper-parameter: write local: Local = "),
        ({"keep": 3}, "Mine.keep has no type, so it is not a hyper-parameter: write keep: int = "),
        (
            {"headlin": "x", "__annotations__": {"headlin": ClassVar[str]}},
            r"Mine.headlin means nothing .* Promises\(headline=…\)",
        ),
        (
            {"promises": fb.Promises(), "__annotations__": {"promises": fb.Promises}},
            "promises is not a hyper-parameter but a property of the method",
        ),
        ({"round": rebinds}, r"test_class_checks.py, line \d+: Mine.round .*`state` .*state.… = …"),
        ({"train": restates}, "Mine.train .*`state`"),
        ({"global_model": gives_nothing}, "Mine.global_model .*`return` missing?"),
    ],
)
def test_what_looks_like_a_slip_in_a_class_is_a_warning(wrong, says):
    with pytest.warns(LikelyMistake, match=says):
        dataclass(frozen=True)(type("Mine", (Plain,), wrong))()


def test_a_word_of_ones_own_is_none():
    fine = {"helper": misspelt, "ROUNDS": 3, "__annotations__": {"round_length": int, "table": ClassVar[dict]}}
    assert list(likely_mistakes(type("Mine", (Plain,), fine | {"round_length": 3, "table": {}}), Method)) == []


def typo(self, state, net, t):
    for _, reply in self.replies(state, net):
        state.theta = reply.thet


def leaves_off(self, state, net, t):
    for _, reply in self.replies(state, net):
        state.theta = reply.theta.dense()
        break


def remembers(self, state, net, t):
    Plain.round(self, state, net, t)
    state.momentum = state.theta


def gives(self, state, net, t):
    Plain.round(self, state, net, t)
    return state


def forgets(self, state: Memory, message: Model, site: fb.Site) -> Update:
    Plain.train(self, state, message, site)


def breaks(self, state: Memory, message: Model, site: fb.Site) -> Update:
    return site.tran


def keeps(self, state: Memory, message: Model, site: fb.Site) -> Update:
    state.mean = message.theta.dense()
    return Plain.train(self, state, message, site)


def nothing(self, problem) -> Server:
    Server(problem.first_state())


def no_memory(self, site: fb.Site) -> Memory:
    Memory(0)


def an_array(self, problem) -> Server:
    return Server({name: value.numpy() for name, value in problem.first_state().items()})


def sends_a_dict(self, state, net, t):
    list(net.call(self.train, to=net.sample(1.0), send=Model(state.theta)))


def sends_theta(self, state, net, t):
    list(net.call(self.train, to=net.sample(1.0), send=state.theta))


def a_dict(self, state, problem) -> nn.Module | None:
    return state.theta


def a_text(self, state, site):
    return "a model"


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"round": typo}, AttributeError, "'Update' object has no attribute 'thet'"),
        ({"round": leaves_off}, fb.MethodError, "'train' was not read"),
        (
            {"round": remembers},
            fb.MethodError,
            "Server .*'momentum'",
        ),
        ({"server": an_array}, TypeError, "Server.theta: 'weight': .*ndarray"),
        ({"round": sends_a_dict}, TypeError, r"Model.theta: .*dict .*Dense\(…\)"),
        (
            {"round": sends_theta},
            fb.MethodError,
            r"mine, round 1: .*'train' takes a Model, .*\(test_class_checks.py",
        ),
        ({"round": gives}, fb.MethodError, "Mine.round returns nothing: .*`state`"),
        ({"train": forgets}, fb.MethodError, "Update, .*`return` missing"),
        (
            {"train": breaks},
            fb.MethodError,
            r"'train': AttributeError: .* 'tran'.* \(test_class_checks.py, line \d+\)",
        ),
        ({"train": keeps}, fb.MethodError, "Memory .*'mean'"),
        ({"server": nothing}, fb.MethodError, "Mine.server .* Server, .*nothing"),
        ({"client": no_memory}, fb.MethodError, "Mine.client .* Memory, .*nothing"),
        ({"global_model": a_dict}, fb.MethodError, "Mine.global_model .*module or None, .*dict"),
        ({"local_model": a_text}, fb.MethodError, "Mine.local_model .*module or None, .*str"),
    ],
)
def test_what_is_wrong_ends_the_run_at_once_and_is_said(wrong, error, says, recwarn):
    with pytest.raises(error, match=says) as raised:
        run(**wrong)
    assert not [each for each in recwarn if "repeated without" in str(each.message)]  # no client is to blame
    if error is AttributeError:
        assert raised.value.__notes__ == ["mine, round 1"]


def untyped(self, state, message, site):
    return Plain.train(self, state, message, site)


def half_typed(self, state: Memory, message: Model, site) -> Update:
    return Plain.train(self, state, message, site)


def of_an_int(self, state: Memory, message: Model, site: int) -> Update:
    return Plain.train(self, state, message, site)


def without_site(self, state: Memory, message: Model) -> Update:
    return Update(message.theta, 1)


def of_what_is_nowhere(self, state: Memory, message: Nowhere, site: fb.Site) -> Update:  # noqa: F821
    return Plain.train(self, state, message, site)


def half_written(self, state: Memory, message: "Model[", site: fb.Site) -> Update:  # noqa: F722
    return Plain.train(self, state, message, site)


def of_a_dict(self, state: Memory, message: dict, site: fb.Site) -> Update:
    return Plain.train(self, state, message, site)


def indirect(self, state, net):
    handler = self.train
    return net.call(handler, to=net.sample(1.0), send=Model(Dense(state.theta)))


HANDLER = r"Mine: .*'train' .* def train\(self, state: …, message: …, site: fb.Site\) -> …"


@pytest.mark.parametrize("rounding", [{}, {"uplink_bits": 4}, {"downlink_bits": 4}])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"train": untyped}, rf"^{HANDLER}.* \(test_class_checks.py, line \d+\)$"),
        ({"train": half_typed}, HANDLER),
        ({"train": of_an_int}, HANDLER),
        ({"train": without_site}, HANDLER),
        ({"train": untyped, "replies": indirect}, HANDLER),
        ({"train": of_what_is_nowhere}, "^Mine: .*'train' .*'Nowhere'"),
        ({"train": half_written}, "^Mine: the type hints .*'train' "),
        ({"train": of_a_dict}, "^Mine: the message .*'train': dict"),
    ],
)
def test_a_handler_whose_types_are_wrong_is_told_before_the_run_begins(wrong, says, rounding, tmp_path):
    with pytest.raises(fb.MethodError, match=says):
        run(out=tmp_path / "run", **wrong, rounding=rounding)
    assert not (tmp_path / "run").exists()


def of_none(self, problem):
    return Server(problem.first_state())


def of_no_site(self, site):
    return Memory(0)


def of_nothing_known(self, problem) -> Nowhere:  # noqa: F821
    return Server(problem.first_state())


def takes_nothing(self):
    return None


def takes_all(*given):
    return None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"server": of_none}, r"^Mine.server must say by its return type .* def server\(self, problem\) -> …, "),
        ({"client": of_no_site}, r"^Mine.client must say by its return type .* def client\(self, site\) -> …, "),
        ({"server": of_nothing_known}, "^the type hints of Mine.server cannot be resolved: name 'Nowhere' is not"),
        ({"server": takes_nothing}, r"Mine.server is a function that a run calls: write def server\(self, problem\)$"),
        ({"client": takes_nothing}, r"Mine.client is .*: write def client\(self, site\)$"),
        ({"global_model": takes_nothing}, r"Mine.global_model is .*: write def global_model\(self, state, problem\)$"),
        ({"local_model": takes_nothing}, r"Mine.local_model is .*: write def local_model\(self, state, site\)$"),
        ({"round": takes_nothing}, r"Mine.round is .*: write def round\(self, state, net, t\)$"),
        ({"server": 3}, "Mine.server is a function that a run calls"),
        ({"promises": 3}, r"Mine.promises must be Promises\(…\), not 3$"),
        ({"needs": 3}, "Mine.needs must be a class, not 3$"),
        ({"__annotations__": {"keep": "Nowhere"}, "keep": 3}, "^the type hints of Mine cannot be resolved: name "),
    ],
)
def test_a_hook_or_an_attribute_that_no_run_can_use_is_told_before_it_begins(wrong, says, tmp_path):
    with pytest.raises(fb.MethodError, match=says):
        run(out=tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sends": 3}, "sends must be text, not 3$"),
        ({"headline": None}, "headline must be text, not None$"),
        ({"streams": 1}, "streams must be true or false, not 1$"),
        ({"aggregates": "median"}, "aggregates must be a set of names, not 'median'$"),
    ],
)
def test_a_promise_that_no_run_can_use_is_told_where_it_is_made(wrong, says):
    with pytest.raises(fb.MethodError, match=f"^Promises: {says}"):
        fb.Promises(**wrong)


def test_hooks_and_attributes_need_no_types_where_a_run_needs_none():
    assert run(finish=takes_all, promises=fb.Promises(sends="all", aggregates={"median"})).summary["status"] == "done"


def test_what_only_looks_like_a_handler_is_none():
    def helps(self, state, message, site):
        return Plain.train(self, state, message, site)

    def train(self, state: Memory, message: Model, site: fb.Site) -> Update:
        return self.helps(state, message, site)

    assert run(helps=helps, train=train, rounding={"uplink_bits": 4}).summary["status"] == "done"


def test_a_headline_that_nothing_scores_is_told():
    with pytest.warns(
        RuntimeWarning, match="names 'personal' as its headline score, which nothing computes: there are"
    ):
        run(promises=fb.Promises(headline="personal"))
