"""LoRA-XS, FFA-LoRA and FedSA-LoRA: what is trained, what is sent, and what the models then are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import TinyNet, tiny_data
from language import LENGTH, TOKENS, write_language_model, write_texts
from modules import needs
from runs import fingerprint
from safetensors.torch import load_file
from torch import nn

import fewbytes as fb
from fewbytes.base.state import all_entries, trained_entries
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower.node import in_common
from fewbytes.models import lora_xs
from fewbytes.models.adapters import Adapters
from fewbytes.models.build import build_model
from fewbytes.models.lora import Lora
from fewbytes.models.lora_xs import Core, factors, with_plain_adapters

needs("peft", "transformers")

TRAINING = {"epochs": 1, "lr": 0.1, "batch": 16}
XS, FFA, FEDSA = "rank=3,alpha=6,core=xs", "rank=3,train=B", "rank=3,send=A"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    write_texts(folder / "texts")
    for kind in ("gpt2", "llama"):
        write_language_model(folder / kind, kind)
    return folder


def tiny(lora):
    return fb.Task.on(tiny_data(), TinyNet, lora=Adapters(Lora.read(lora)))


def found(place, lora, kind="gpt2"):
    return find(
        make_experiment(
            {"method": "fedavg", "dataset": str(place / "texts"), "model": f"hf:{place / kind}", "lora": lora,
             "length": LENGTH, "clients": 3, "rounds": 2, "parameters": TRAINING}
        )
    )  # fmt: skip


def trained_xs(model):
    """The model with random R."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Core):
                module.core.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model.eval()


# The setting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["rank=8", XS, FFA, FEDSA, "rank=8,alpha=4,targets=a+b,core=xs"])
def test_settings_are_read_as_they_are_written(text):
    assert str(Lora.read(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=8,core=xl", "core=xs, not core=xl"),
        ("rank=8,train=A", "train=B, not train=A"),
        ("rank=8,send=", "send=A, not send="),
        ("rank=8,core=xs,train=B", "one of core=xs and train=B"),
        ("rank=8,send=A,train=B", "one of train=B and send=A"),
        ("rank=8,send=A,core=xs", "one of core=xs and send=A"),
    ],
)
def test_other_variants_are_refused_in_one_line(text, words):
    with pytest.raises(fb.UserError, match=words) as error:
        Lora.read(text)
    assert "\n" not in str(error.value)


def test_xs_refuses_what_has_no_matrix_and_grouped_convolutions():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.grouped, self.last = nn.Embedding(9, 4), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 2)

    for target, kind in (("table", "Embedding"), ("grouped", "Conv2d")):
        with pytest.raises(fb.UserError, match=rf"{target} is a {kind}: leave it out of targets"):
            Adapters(Lora.read(f"rank=2,core=xs,targets={target}")).added(Net(), head=True)


# The factors of LoRA-XS -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (6, 3, 3, 3)])
@pytest.mark.parametrize("rank", [4, 100])
def test_the_factors_are_the_truncated_decomposition(shape, rank):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, right = factors(weight, rank)
    u, s, vt = np.linalg.svd(weight.flatten(1).numpy().astype(np.float64), full_matrices=False)
    rank = min(rank, len(s))
    assert (left.shape, right.shape) == ((shape[0], rank), (rank, weight[0].numel()))
    best = (u[:, :rank] * s[:rank]) @ vt[:rank]
    assert np.linalg.norm((left @ right).numpy() - best) < 0.004 * np.linalg.norm(best)  # bfloat16 has 8 bits
    assert (right.gather(1, right.abs().argmax(1, keepdim=True)) > 0).all()


def test_the_factors_depend_neither_on_the_library_nor_on_the_number_of_threads(monkeypatch):
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(lora_xs, "_decomposed", {})
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found.append(factors(weight, 16))
        finally:
            assert torch.get_num_threads() == threads
            torch.set_num_threads(before)
    u, s, vt = np.linalg.svd(weight.numpy().astype(np.float64), full_matrices=False)  # with OpenBLAS
    left, right = (torch.from_numpy(each).bfloat16().float() for each in ((u * s)[:, :16], vt[:16]))
    sign = right.gather(1, right.abs().argmax(1, keepdim=True)).sign()
    found.append((left * sign.T, right * sign))
    for each in found[1:]:
        assert torch.equal(each[0], found[0][0])
        assert torch.equal(each[1], found[0][1])


def test_both_ends_notice_other_factors(place, monkeypatch):
    def agreed():
        of = found(place, XS)
        return in_common(of.experiment.build_method(), of.task, 0)

    first = agreed()
    monkeypatch.setattr(lora_xs, "_decomposed", {})
    assert agreed() == first  # computed again
    key = next(iter(lora_xs._decomposed))
    left, right = lora_xs._decomposed[key]
    lora_xs._decomposed[key] = -left, -right  # as on a machine with the other sign
    changed = {name for name, value in agreed().items() if value != first[name]}
    assert len(changed) == 1
    assert "not trained" in changed.pop()


# The model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [XS, FFA, FEDSA])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_first_model_is_the_base_model_to_the_bit(place, lora, kind):
    x = torch.arange(LENGTH)[None]
    plain = build_model(f"hf:{place / kind}", (LENGTH,), TOKENS, "tokens").eval()
    assert torch.equal(found(place, lora, kind).task.problem.model(0).eval()(x), plain(x).logits)


def test_only_rank_by_rank_matrices_are_trained(place):
    problem = found(place, XS).task.problem
    state = problem.first_state()
    layers = sum(isinstance(module, Core) for module in problem.model(0).modules())
    assert layers > 0
    assert {tuple(value.shape) for value in state.values()} == {(3, 3)}
    assert sum(value.numel() for value in state.values()) == 9 * layers
    model = trained_xs(problem.model(0))
    model(torch.arange(LENGTH)[None]).square().sum().backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert gradients == set(state)


def test_a_step_changes_zero_cores(place):
    model = found(place, XS).task.problem.model(0)
    model(torch.arange(LENGTH)[None]).square().sum().backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if name in trained_entries(model))


def test_an_adapted_layer_equals_one_merged_by_hand(place):
    """W + alpha/rank A R B for a linear layer, a Conv1D of transformers, and a convolution."""
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    cases = [
        (nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(80, 4)), "0", x),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.Linear(7, 4)), "1", x),
        (build_model(f"hf:{place / 'gpt2'}", (LENGTH,), TOKENS, "tokens"), "c_fc", torch.arange(LENGTH)[None]),
    ]
    for model, target, samples in cases:
        adapted = trained_xs(Adapters(Lora.read(f"{XS},targets={target}")).added(model, head=False)).double()
        samples = samples.double() if samples.is_floating_point() else samples
        with torch.no_grad():
            want = getattr(out := adapted(samples), "logits", out)
            for name, layer in list(adapted.named_modules()):
                if hasattr(layer, "lora_A"):
                    a, core, b = layer.lora_B["default"], layer.lora_A["default"].core, layer.lora_A["default"].factor
                    change = 2 * a.weight.flatten(1) @ core.weight.flatten(1) @ b.weight.flatten(1)
                    weight = layer.base_layer.weight
                    weight += change.T if type(layer.base_layer).__name__ == "Conv1D" else change.view_as(weight)
                    adapted.set_submodule(name, layer.base_layer)
            merged = getattr(out := adapted(samples), "logits", out)
        torch.testing.assert_close(merged, want)


@pytest.mark.parametrize("of", ["convolution", "language model"])
def test_peft_merges_and_an_export_has_ordinary_adapters(place, of):
    problem = tiny(XS).problem if of == "convolution" else found(place, XS).task.problem
    x = problem.blank() if of == "convolution" else torch.arange(LENGTH)[None]
    model = trained_xs(problem.model(0))
    with torch.no_grad():
        want = model(x)
        plain = with_plain_adapters(model)
        torch.testing.assert_close(plain(x), want)
        assert not any(isinstance(module, Core) for module in plain.modules())
        for layer in plain.modules():
            if hasattr(layer, "lora_A"):
                layer.merge()
        torch.testing.assert_close(plain(x), want)


def test_peft_merges_layers_of_xs(place):
    model = trained_xs(found(place, XS).task.problem.model(0))
    x = torch.arange(LENGTH)[None]
    with torch.no_grad():
        want = model(x)
        for layer in model.modules():
            if hasattr(layer, "lora_A"):
                layer.merge()
        torch.testing.assert_close(model(x), want)


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [fb.FedAvg, fb.FedBN, fb.FedProx, fb.FedAdam, fb.Ditto, fb.SCAFFOLD, fb.FedPURIN, fb.DGC]
)
def test_methods_train_cores(method):
    task = tiny(XS)
    result = fb.run(method(**TRAINING), task, rounds=1, workers=1)
    assert result.ledger.totals()["uplink_bytes"] > 0
    if result.global_model is not None:
        changed = trained_entries(result.global_model)
        assert any(changed[name].any() for name in changed if ".core." in name)


class Stopping(fb.Watcher):
    def scored(self, row):
        if row["round"] == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lora", [XS, FFA, FEDSA])
def test_a_stopped_run_is_resumed(place, lora, tmp_path):
    method = fb.FedAvg(**TRAINING)
    fb.run(method, found(place, lora).task, rounds=2, workers=1, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fb.run(method, found(place, lora).task, rounds=2, workers=1, out=tmp_path / "stopped", watcher=Stopping())
    fb.run(method, found(place, lora).task, rounds=2, workers=1, out=tmp_path / "stopped", resume=True)
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("lora", [XS, FFA])
def test_saved_and_exported_models_are_those_of_the_run(place, lora, tmp_path):
    of = found(place, lora)
    result = fb.run(of.experiment.build_method(), of.task, rounds=1, workers=1, out=tmp_path, about=of.about())
    x = torch.arange(2 * LENGTH).view(2, LENGTH) % TOKENS
    with torch.no_grad():
        want = result.global_model(x)
        saved = load_file(tmp_path / "models" / "global.safetensors")
        assert saved.keys() == of.task.problem.first_state().keys()
        loaded = fb.load_model(tmp_path)
        assert torch.equal(loaded(x).logits, want)
        fb.export_model(tmp_path, formats=["torch", "safetensors"])
        torch.testing.assert_close(torch.export.load(tmp_path / "export" / "model.pt2").module()(x), want)
        ordinary = found(place, "rank=3,alpha=6" if lora == XS else "rank=3").task.problem.model(0).eval()
        exported = load_file(tmp_path / "export" / "model.safetensors")
        assert exported.keys() == all_entries(ordinary).keys() | (exported.keys() & {"lm_head.weight"})
        ordinary.load_state_dict(exported)
        torch.testing.assert_close(ordinary(x), want)


def test_ffa_sends_b_alone_and_a_stays_as_drawn(place):
    task = found(place, FFA).task
    assert all("lora_B" in name for name in task.problem.first_state())
    result = fb.run(fb.FedAvg(**TRAINING), task, rounds=2, workers=1)
    first, last = all_entries(task.problem.first_model()), all_entries(result.global_model)
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed == set(task.problem.first_state())
    values = sum(value.numel() for value in task.problem.first_state().values())
    assert result.ledger.totals()["uplink_nominal_bytes"] == pytest.approx(2 * 3 * 4 * values, rel=0.03)


@pytest.mark.parametrize("method", [fb.FedAvg, fb.FedBN])
def test_fedsa_sends_a_alone_and_every_client_keeps_its_b(place, method, tmp_path):
    of = found(place, FEDSA)
    task = of.task
    about = of.about()
    result = fb.run(method(**TRAINING), task, rounds=2, workers=1, out=tmp_path, about=about)
    values = sum(value.numel() for name, value in task.problem.first_state().items() if "lora_A" in name)
    for way in ("uplink", "downlink"):
        nominal = result.ledger.totals()[f"{way}_nominal_bytes"]
        assert nominal == pytest.approx(2 * 3 * 4 * values, rel=0.03)
    assert result.global_model is None
    assert result.summary["score"]["kind"] == "personalised"
    models = [trained_entries(fb.load_model(tmp_path, client)) for client in range(3)]
    b = [name for name in models[0] if "lora_B" in name]
    assert b
    assert all(models[0][name].any() and not torch.equal(models[0][name], models[1][name]) for name in b)


def test_fedsas_server_takes_the_mean_of_a(place):
    """One client's own model is what FedAvg of LoRA gives it: nothing is lost by keeping B."""
    data = tiny_data(clients=1)
    runs = [
        fb.run(fb.FedAvg(**TRAINING), fb.Task.on(data, TinyNet, lora=Adapters(Lora.read(lora))), rounds=3, workers=1)
        for lora in ("rank=3", FEDSA)
    ]
    plain, own = (run.rounds[-1]["scores"]["accuracy"]["personalised"] for run in runs)
    assert plain == own


def test_methods_that_send_all_refuse_to_keep_b():
    for method in (fb.FedProx, fb.SCAFFOLD, fb.DGC, fb.Ditto):
        with pytest.raises(fb.UserError, match=f"send=A.*{method.__name__.lower()}") as error:
            fb.run(method(**TRAINING), tiny(FEDSA), rounds=1, workers=1)
        assert "\n" not in str(error.value)
