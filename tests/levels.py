"""Two levels of tests: what `make test` runs for every change, and what `make test-all` runs besides.

Of the laws and other tests over all cases, `make test` runs those that cover what methods do (COVERING), and those that
changed since all were run: `make test-all` ends by `python tests/levels.py`, which writes verified.json beside this
file, a digest of each case (its own file, its method's, and what that imports of `methods/`), and one of what all cases
stand on. A case whose digest is another by now is run by `make test`, too; if the ground is, all are.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from cases import CASES
from modules import MODULES, closure, room

import fewbytes as fb

TESTS = Path(__file__).parent
FILE = TESTS / "verified.json"
OVER_CASES = (
    "laws/",
    "flower/test_drift.py",
    "models/test_frozen.py",
    "methods/test_secure.py",
    "process/test_every_method.py",
)
"""Where tests are over cases, or methods, by their names."""
SLOW = {
    "device/": "all methods on a device that pretends to be another",
    "second_golden/": "makes a second set of golden vectors",
    "core/test_precision.py::test_bf16_learns": "two trainings in bfloat16",
    "data/test_data.py::test_real_data_sets[cifar10": "decodes 60,000 pictures",
    "experiments/test_evaluate.py::test_a_resumed_run": "a run, and training alone beside it",
    "experiments/test_evaluate.py::test_a_comparison": "a comparison of two methods",
    "methods/test_feddyn_moon_fedala_pfedme.py::test_it_learns": "four trainings on real images",
    "methods/test_malicious.py::test_by_its_rule": "five systems with malicious clients, measured",
    "methods/test_poisoned.py::test_by_a_rule": "malicious clients under every rule, measured",
    "methods/test_poisoned.py::test_clipped": "malicious clients under clipping, measured",
    "methods/test_fusefl_runs.py::test_clients_with_different_models": "whole runs of four families of models",
    "methods/test_fedktl.py::test_centroids": "a training of its generator's latents",
    "methods/test_fedktl.py::test_a_run_resumed_by_a_new_process": "two processes",
    "methods/test_fedkgf.py::test_permuted_assembly": "a comparison of two trainings",
    "methods/test_fusefl.py::test_local_model_of_every_stage[forward-conv-8": "eight blocks; four are built alike",
    "methods/test_fusefl.py::test_local_model_of_every_stage[forward-avg-8": "eight blocks; four are built alike",
    "methods/test_fusefl_runs.py::test_the_fused_network_can_be_exported": "an export by torch's compiler",
    "process/test_every_method.py::test_it_runs[fusefl": "40 epochs for each of four blocks",
    "models/test_export.py::test_a_methods_model": "exports of every kind of method",
    "reproduce/test_reproduce.py::test_the_settings_of_every_cell": "every cell of every table",
    "wire/test_wire.py::test_sections_with_flipped_bits": "every bit of every section",
    "cli/test_new.py": "a new project's tests",
    "cli/test_explains.py::test_a_new_project": "a new project's tests",
    "cli/test_cli.py::test_interrupted": "long runs that are interrupted",
    "flower/test_private.py::test_a_simulations_pool": "starts Ray",
    "flower/test_flower.py::test_with_a_schedule": "runs with clients that come and go",
    "nvflare/test_nvflare_simulator.py": "runs of NVFlare's simulator",
    "process/test_adapters_example.py": "an example of minutes",
    "process/test_shared_comparison.py": "processes that share a comparison, one of them killed",
    "process/test_save_every.py": "trainings and runs that are killed",
    "process/test_chaos.py": "deployments over links that fail",
    "process/test_cluster.py": "Ray on two hosts",
    "process/test_mailbox_deployed.py": "deployments by files, one of which is lost for a minute",
    "process/test_containers.py::test_the_steps": "an image's steps, and a deployment in it",
    "process/test_deployment.py::test_a_node_runs_the_installed": "deployments with bundles of strangers",
    "process/test_deployment.py::test_nothing_is_left": "deployments that are left",
    "process/test_deployment.py::test_nodes_reach": "SuperLinks at five kinds of addresses",
    "process/test_deployment.py::test_a_renewed": "a SuperLink whose certificate is renewed",
    "process/test_deployment.py::test_a_proxy": "a SuperLink behind a proxy",
    "process/test_documents.py": "every command and example of the documents",
    "process/test_durability.py": "losses of power, full disks",
    "process/test_examples.py": "every example",
    "process/test_exported_models.py::test_a": "models exported from runs of their own",
    "process/test_exported_models.py::test_the_best": "models exported from runs of their own",
    "process/test_exported_models.py::test_rows": "models exported from runs of their own",
    "process/test_federation.py": "an example of a federation whose members change",
    "process/test_few_bytes_deployed.py": "a node that is killed, thrice",
    "process/test_flower_processes.py": "deployments and simulations of every kind",
    "process/test_hospitals.py": "an example over a slow link",
    "process/test_kill.py": "kill -9 at every stage",
    "process/test_language_model_example.py": "an example in Flower's simulation",
    "process/test_notebooks.py::test_a_notebook_runs": "every tutorial",
    "process/test_operators.py": "deployments of three sites, watched",
    "process/test_own_transport.py": "a server and clients over HTTP",
    "process/test_preflight_deployed.py": "a SuperLink, and a process for each broken set-up",
    "process/test_resident_nodes.py": "nodes that outlive their servers",
    "process/test_site_policies.py": "a deployment to nine sites with policies",
    "process/test_sites.py": "two hosts that are stopped and gone on with",
    "process/test_evaluation_deployed.py": "an evaluation at five sites with policies",
    "process/test_questions_deployed.py": "a survey and an evaluation by files",
    "process/test_survey_deployed.py": "a survey of six sites with policies",
    "process/test_surveyed_run.py": "a survey and a run of three sites",
}
"""Beginnings of tests' names below tests/, and what takes them long: `make test-all` alone runs them."""
QUICK = (
    "process/test_documents.py::test_the_readme",
    "process/test_documents.py::test_commands[README.md]",
    "process/test_documents.py::test_python_blocks",
    "process/test_deployment.py::test_a_node_runs_the_installed_application_only[resident-apps.py]",
    "process/test_durability.py::test_what_",
    "process/test_flower_processes.py::test_every_image",
    "process/test_flower_processes.py::test_deploy_prepares",
    "process/test_flower_processes.py::test_what_is_wrong",
    "process/test_kill.py::test_kill_minus_nine_of_the_whole_run[6-fedpurin]",
)
"""But these of them `make test` runs, too."""
COVERING = {
    "fedavg": "a global model",
    "scaffold-sampled": "states of clients' own, some clients a round",
    "fedpurin": "messages that wait for the next request",
    "genefl": "newcomers",
    "fedkgf": "generated kernels",
    "fusefl": "rounds of its own, and a last step",
    "fedktl": "models that differ, a server with a generator",
    "fedbuff": "a stream",
    "dense": "a server that trains",
    "learngene": "clusters",
    "dgc": "what rounding has lost, kept by clients",
    "fedper": "a part of the model that stays at home",
    "separate": "nothing that is sent",
}
GROUND = ("base", "wire", "core", "engines", "running")
"""The rooms that every case stands on."""


def digest(files: Iterable[Path]) -> str:
    """Of files' names and contents."""
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def digests() -> dict[str, str]:
    """By case, and of the ground."""
    methods = [name for name in MODULES if room(name) == "methods"]
    ground = [path for name, path in MODULES.items() if room(name) in GROUND]
    ground += [*TESTS.glob("*.py"), *(TESTS / "laws").glob("*.py"), TESTS / "cases" / "__init__.py"]
    made = {"ground": digest([*ground, TESTS.parent / "pyproject.toml"])}
    for name, method in CASES.items():
        case, inner = TESTS / "cases" / f"{name.partition('-')[0]}.py", getattr(method, "inner", method)
        used = {each for of in (method, inner) for each in closure(type(of).__module__, methods)}
        made[name] = digest([case, *(MODULES[each] for each in used)])
    return made


@functools.cache
def quick_cases() -> frozenset[str]:
    """The cases over which `make test` runs the laws."""
    now, then = digests(), json.loads(FILE.read_text()) if FILE.exists() else {}
    if now["ground"] != then.get("ground"):
        return frozenset(CASES)
    return frozenset(COVERING) | {name for name in CASES if now[name] != then.get(name)}


def is_for_all_alone(test: str, name: object) -> bool:
    """Whether `make test` leaves out a test, by its name below tests/ and its parameter `name`."""
    if test.startswith(tuple(SLOW)) and not test.startswith(QUICK):
        return True
    return test.startswith(OVER_CASES) and name in [*CASES, *fb.METHODS] and name not in quick_cases()


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=1) + "\n")
