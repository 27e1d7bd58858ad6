# Hugging Face's Trainer. It sets the same seed on all ranks. Since version 5 it
# multiplies the loss by their number, which is wrong where a model returns a mean.
# needs: transformers
# case: gpt | ok gradient; note masks
# case ci: bert | WRONG gradient first=0 off=0.99..1.01 factor=2; note masks
import transformers as hf
from common import *


class Rows(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        row = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(i))
        label = row if case == "gpt" else (row.sum() % 2).long()
        return {"input_ids": row, "labels": label}


if case == "gpt":
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, **sizes))
else:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 16}
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=50, **sizes))
options = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "report_to": []}
options |= {"save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 1e9}
options = hf.TrainingArguments("out", **options)
hf.Trainer(model, options, train_dataset=Rows()).train()
