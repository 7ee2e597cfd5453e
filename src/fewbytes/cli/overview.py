"""What the commands are, by what they are for, and the page that lists them: nothing is imported for it."""

COMMANDS = {
    "Run": {
        "run": "one method; leaves a folder with the result, the models, the ledger and a report",
        "compare": "several methods on the same clients, and which to take",
        "plan": "what a run would cost in bytes and time, from a few real rounds",
        "methods": "the methods; with a name, its paper, idea, cost and parameters",
    },
    "On real machines": {
        "deploy": "one method on Flower's SuperLink and nodes, over TLS",
        "node": "be the node of a client of a deployment",
    },
    "After a run": {
        "report": "write the report of one run, or one page that compares several",
        "export": "write the model as files that run without this package",
        "probe": "what the model knows at each depth of the image and the label",
        "attack": "what a server could see of the clients' images, or what liars do",
        "inspect": "what a frame holds",
    },
    "More": {
        "reproduce": "a paper's table, ours beside theirs",
        "new": "the files of a new project, or of a new method",
        "doctor": "what is installed here, and what works",
    },
}
"""By what they are for, the commands and a line on each."""
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
    lines += ["Options:", "  -h, --help             Show this, or with a command its options and examples."]
    lines += ["  --version              Print the version."]
    lines += ["  --install-completion   Complete commands, options and methods in this shell."]
    return "\n".join(lines)
