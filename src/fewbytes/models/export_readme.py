"""The README beside an exported model: its inputs and outputs, and Python code that runs it."""

from __future__ import annotations

import json
import re
from html import escape
from string import Template
from typing import Any

from fewbytes.base.errors import cleaned

About = dict[str, Any]  # the contents of model.json

LOADED = {
    "torch": 'torch.export.load("model.pt2").module()',
    "onnxruntime": 'onnxruntime.InferenceSession("model.onnx")',
}

# These templates are Python that users run without fewbytes installed: for a table's rows, for classifying texts, and
# for continuing texts.
ROWS = Template("""\
import csv, json, math, $library

about = json.load(open("model.json", encoding="utf-8"))
model = $loaded


${softmax}def answer(row):  # a dict of values, or of text as a CSV file has it
    x = []
    for column in about["table"]["columns"]:
        name, known = column["name"], column.get("categories")
        value = "" if row[name] is None else str(row[name])
        if known is not None and value in known:
            x += [float(value == category) for category in known]
        elif value in about["table"]["missing"]["written"]:
            $missing
        elif known is not None:
            $unknown
        else:
            number = float({"true": 1, "false": 0}.get(value.lower(), value))
            x.append((number - column["mean"]) / column["std"])
    outputs = $outputs[0].flatten().tolist()
    return $answer


for row in csv.DictReader(open("rows.csv", encoding="utf-8", newline="")):
    print(answer(row))
""")
SOFTMAX = """\
def softmax(logits):  # probabilities
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


"""
MISSING = {
    "refuse": 'raise ValueError(f"{name} is missing")',
    "mean": "x += [0.0] * (1 if known is None else len(known))",
}
MISSING["drop"] = MISSING["refuse"]
UNKNOWN = {
    "refused": 'raise ValueError(f"{name} is {value!r}, and the model knows {known}")',
    "zeros, no category": "x += [0.0] * len(known)",
}
ANSWERS = {
    "classes": 'dict(zip(about["classes"], softmax(outputs)))',
    "labels": 'dict(zip(about["classes"], [1 / (1 + math.exp(min(700, -y))) for y in outputs]))',
    "numbers": '{of["name"]: float(y) * of["std"] + of["mean"] for of, y in zip(about["table"]["target"], outputs)}',
}
TEXTS = Template("""\
import json, math, numpy, transformers, $library

about = json.load(open("model.json", encoding="utf-8"))
tokenizer = transformers.AutoTokenizer.from_pretrained(".")
model = $loaded


${softmax}def answer(text):
    tokens = tokenizer(text, truncation=True, max_length=$length)["input_ids"]
    ids = numpy.full((1, $length), $filler, "int64")
    mask = numpy.zeros((1, $length), "int64")
    ids[0, : len(tokens)], mask[0, : len(tokens)] = tokens, 1
    return dict(zip(about["classes"], softmax($outputs[0].tolist())))


print(answer("a text of yours"))
""")
CONTINUED = Template("""\
import numpy, transformers, $library

tokenizer = transformers.AutoTokenizer.from_pretrained(".")
model = $loaded


def answer(text, more=10):  # the text and `more` tokens, each the likeliest
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for _ in range(more):
        seen = tokens[-$length:]
        x = numpy.full((1, $length), $filler, "int64")
        x[0, : len(seen)] = seen
        tokens.append(int($outputs[0, len(seen) - 1].argmax()))
    return tokenizer.decode(tokens)


print(answer("a text of yours"))
""")


def readme(about: About) -> str:
    """The text of README.md."""
    method = "a run" if about["method"] is None else _words(about["method"])
    after = f", round {about['round']}" if about.get("round") else ""
    parts = [f"# {about['model']} model of {method}{after}", f"{_taken(about)} {_given(about)}"]
    if about["normalise"]:
        parts.append("It normalises x itself: give x as it is.")
    if "model.pt2" in about["files"]:
        parts.append(f"With PyTorch {about['torch']} or newer:\n\n{_snippet(about, 'torch')}")
    if "model.onnx" in about["files"]:
        parts.append(f"With onnxruntime:\n\n{_snippet(about, 'onnxruntime')}")
    if "model.safetensors" in about["files"]:
        of = f" ({_words(about['architecture'])})" if about["architecture"] else ""
        parts.append(
            f"model.safetensors holds the weights by name, for a module of your own{of}:\n\n"
            '```python\nmodule.load_state_dict(safetensors.torch.load_file("model.safetensors"))\n```'
        )
        if about["normalise"]:
            parts.append("That module gets (x - mean) / std, for every channel, of `normalise` in model.json.")
    return "\n\n".join(parts) + "\n"


def _words(text: str) -> str:
    """A name from a run or an untrusted model file, escaped as plain text in Markdown."""
    return re.sub(r"[\\`\[\]]", r"\\\g<0>", escape(cleaned(str(text)), quote=False))


def _taken(about: About) -> str:
    """A sentence about the model's inputs."""
    taken, table, text = about["input"], about["table"], about["text"]
    shape = taken["shape"]
    if taken["tensors"]:
        each = [f"{_words(name)} {of['dtype']} ({_listed(of['shape'])})" for name, of in taken["tensors"].items()]
        words = f"It takes samples of several tensors, {', '.join(each)}"
    else:
        words = f"It takes samples x, {taken['dtype']} ({_listed(shape)})"
    if taken["pixels_divided_by"] and len(shape) != 4:
        words += f", bytes divided by {taken['pixels_divided_by']}"
    elif taken["pixels_divided_by"]:
        words += f", upright images with values 0 to 1: {'RGB' if shape[1] == 3 else 'grey'} pixels divided by 255"
        words += ", on white where they are transparent"
        if taken["image_size"]:
            words += f", the shorter side scaled to {taken['image_size']} pixels and the middle of the longer one taken"
    if table:
        words += (
            ": for each column of `table` in model.json (value - mean) / std, or 0 or 1 for each of its categories. A "
            f"missing value is {table['missing']['becomes']}; an unknown category is {table['unknown_category']}"
        )
    if text:
        cut = "cut off there" if about["learns"] == "classes" else "the last ones of a text"
        words += (
            f": {text['length']} tokens by the tokenizer beside it, {cut}, fewer filled up on the right with token "
            f"{text['padding']['token']}" + (", where attention_mask is 0" if taken["tensors"] else "")
        )
    return f"{words}."


def _given(about: About) -> str:
    """A sentence about the model's outputs."""
    scaled = "in standard deviations from the mean, `target` in model.json, as its scores are"
    given = {
        "classes": "logits, one for each of `classes` in model.json: their softmax is a probability for each",
        "labels": "logits, one for each of the labels, `classes` in model.json: the sigmoid is a probability",
        "numbers": f"numbers (n, {len(about['classes'])}), {scaled}" if about["table"] else "its outputs",
        "masks": "logits (n, classes, height, width)",
        "tokens": "logits (n, length, tokens)",
    }.get(about["learns"], "its outputs")
    return f"It gives {given}."


def _listed(shape: list[Any]) -> str:
    return ", ".join(map(str, shape))


def _snippet(about: About, library: str) -> str:
    """Python that runs the model: on a row, a text or an image, else on samples of zeros."""
    words = {"library": library, "loaded": LOADED[library], "softmax": SOFTMAX if about["learns"] == "classes" else ""}
    if about["table"]:
        if library == "torch":
            x = "model(torch.tensor([x]))"
        else:
            x = _outputs(library, {"x": 'numpy.array([x], "float32")'})
            words["library"] = f"numpy, {library}"
        how = {"missing": MISSING[about["table"]["missing"]["rule"]], "answer": ANSWERS[about["learns"]]}
        lines = ROWS.substitute(words, outputs=x, unknown=UNKNOWN[about["table"]["unknown_category"]], **how)
    elif about["text"]:
        words |= {"length": about["text"]["length"], "filler": about["text"]["padding"]["token"]}
        if about["learns"] == "classes":
            x = _outputs(library, {"input_ids": "ids", "attention_mask": "mask"})
            lines = TEXTS.substitute(words, outputs=x)
        else:
            lines = CONTINUED.substitute(words, outputs=_outputs(library, {"x": "x"}))
    else:
        lines = "\n".join(_of_samples(about, library)) + "\n"
    return f"```python\n{lines}```"


def _outputs(library: str, tensors: dict[str, str]) -> str:
    """The call that computes the model's outputs from arrays, by the tensors' names."""
    if library == "torch":
        return f"model({', '.join(f'torch.from_numpy({array})' for array in tensors.values())})"
    given = ", ".join(f"{json.dumps(name)}: {array}" for name, array in tensors.items())
    return f"model.run(None, {{{given}}})[0]"


def _of_samples(about: About, library: str) -> list[str]:
    """A few lines that run the model on an image, or on zeros."""
    taken = about["input"]
    labelled = about["learns"] == "classes" and about["classes"]
    imports = ["json"] if labelled else []
    arrays = {"x": "x"}
    if taken["pixels_divided_by"] and len(taken["shape"]) == 4:
        _, channels, height, width = taken["shape"]
        grey = channels == 1
        axes = "[None, None]" if grey else ".transpose(2, 0, 1)[None]"
        lines = [
            f'image = PIL.ImageOps.exif_transpose(PIL.Image.open("image.png")).convert("{"L" if grey else "RGB"}")',
            f"image = PIL.ImageOps.fit(image, {(width, height)}, PIL.Image.Resampling.BILINEAR)",
            f'x = numpy.array(image, "float32"){axes} / 255',
        ]
        imports += ["numpy", library, "PIL.Image", "PIL.ImageOps"]
    else:
        tensors = taken["tensors"] or {"x": taken}
        arrays = {name: name if name.isidentifier() else f"x{i}" for i, name in enumerate(tensors)}
        lines = [
            f'{array} = numpy.zeros({(1, *of["shape"][1:])}, "{of["dtype"]}")  # replace with your samples'
            for array, of in zip(arrays.values(), tensors.values(), strict=True)
        ]
        imports += ["numpy", library]
    outputs = _outputs(library, arrays)
    head = [f"import {', '.join(imports)}", f"model = {LOADED[library]}", *lines]
    if not labelled:
        return [*head, f"print({outputs})"]
    return [
        *head,
        f"logits = numpy.asarray({outputs}[0].tolist())",
        "probabilities = numpy.exp(logits - logits.max()) / numpy.exp(logits - logits.max()).sum()",
        'print(dict(zip(json.load(open("model.json"))["classes"], probabilities.tolist())))',
    ]
