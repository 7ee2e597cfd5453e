"""The list of commands by purpose, and the help page that shows it, without any import."""

COMMANDS = {
    "Before a run": {
        "survey": "ask the sites what data they have, without training; find what differs between them",
        "check": "check a site's or the server's set-up before a run",
    },
    "Run": {
        "run": "run one method; writes a folder with the result, models, ledger and a report",
        "compare": "run several methods on the same clients and recommend one",
        "plan": "estimate what a run costs in bytes and time, from a few real rounds",
        "partition": "show how a dataset is split among clients, without training",
        "methods": "list all methods, or show one method's paper, idea, cost and parameters",
    },
    "On real machines": {
        "deploy": "run one method on Flower's SuperLink and nodes, over TLS",
        "node": "start the node of a client of a deployment, or make a site's key and folder",
        "federation": "make a federation; invite, accept, list and remove its members",
        "status": "print a run's round, sites, bytes and time left, while it runs",
    },
    "After a run": {
        "report": "write an HTML report of one run, or one that compares several",
        "evaluate": "test models at every site, and compare them with training alone",
        "export": "export the model to files that work without fewbytes",
        "probe": "measure what each layer of a trained model encodes",
        "attack": "measure what a server could see of clients' images, or what malicious clients do",
        "inspect": "print the contents of a message that was kept as a file",
        "statement": "write a page for an ethics board: what the clients of a run sent, and what it reveals",
        "audit": "verify a node's record of what left it, and write such a page",
    },
    "Only the codec": {
        "encode": "encode a safetensors file in few bytes, to send by mail or through an object store",
        "decode": "decode an encoded file to a safetensors file",
    },
    "More": {
        "reproduce": "reproduce a paper's table, and compare its figures with ours",
        "new": "write the files of a new project, or of a new method",
        "schema": "print the JSON schema of what a command prints with --json",
        "doctor": "check what is installed and what works",
    },
}
"""The commands by purpose, with a line on each."""
EXAMPLES = (
    "fewbytes run fedpurin --dataset digits --clients 10 --alpha 0.3 --rounds 5",
    "fewbytes compare fedavg fedpurin separate --dataset digits --rounds 5 --set epochs=2",
    "fewbytes methods fedpurin",
)


def page() -> str:
    """The help of all commands."""
    lines = ["Federated learning over slow links, measured in the bytes that cross the wire.", ""]
    lines += ["Usage: fewbytes COMMAND [OPTIONS]", ""]
    for group, commands in COMMANDS.items():
        lines += [f"{group}:", *(f"  {name:<10} {line}" for name, line in commands.items()), ""]
    lines += ["Examples:", *(f"  {example}" for example in EXAMPLES), ""]
    lines += ["Options:", "  -h, --help             Show this help; with a command, its options and examples."]
    lines += ["  --version              Print the version."]
    lines += ["  --install-completion   Complete commands, options and methods in this shell."]
    return "\n".join(lines)
