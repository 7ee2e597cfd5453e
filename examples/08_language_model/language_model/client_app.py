"""A client: transformers' Trainer trains the adapters on the client's own texts. One line is fewbytes'."""

import tempfile

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import Trainer, TrainingArguments

from fewbytes.flower.mod import fewbytes_mod
from language_model.models import load
from language_model.texts import samples

app = ClientApp(mods=[fewbytes_mod(bits=0.5)])  # was ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(message, context, folder)
        loss = trainer.train().training_loss
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainer.train_dataset)})
    adapters = ArrayRecord(get_peft_model_state_dict(trainer.model))
    return Message(RecordDict({"arrays": adapters, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(message, context, folder)
        loss = trainer.evaluate()["eval_loss"]
    metrics = MetricRecord({"eval_loss": loss, "num-examples": len(trainer.eval_dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def trainer_of(message: Message, context: Context, folder: str) -> Trainer:
    """A trainer with the adapters that the server sent, and this client's samples."""
    config = context.run_config
    model, tokenizer = load(config)
    set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    train_set, held_out = samples(client, tokenizer, int(config["texts.tokens"]), int(config["texts.characters"]))
    arguments = TrainingArguments(
        folder, learning_rate=float(config["train.learning-rate"]), num_train_epochs=float(config["train.epochs"]),
        per_device_train_batch_size=int(config["train.batch"]), lr_scheduler_type="constant",
        seed=int(message.content["config"]["server-round"]), save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=train_set, eval_dataset=held_out)
