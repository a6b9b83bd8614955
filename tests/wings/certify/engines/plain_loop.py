"""A plain PyTorch loop as an engine: DistributedDataParallel and a Llama written out in one file.

    trainspec certify --engine "python plain_loop.py"

It reads a request and writes an answer (docs/spec/engine-protocol.md). It trains in data-parallel replicas or in one
process, and declines everything else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCHEMA = "trainspec.engine/1"


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden = c["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q, k, v = (
            matrix(x).view(batch, length, heads, self.size).transpose(1, 2)
            for matrix, heads in ((self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = FeedForward(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class Llama(nn.Module):
    def __init__(self, c, length):
        super().__init__()
        self.model = Body(c)
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        rates = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.model.embed_tokens(inputs)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.model.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def why_declined(request):
    layout = request["layout"]
    spread = [axis for axis in ("dp_shard", "cp", "tp", "pp", "ep") if layout[axis] > 1]
    if spread:
        return f"it trains replicas only, without {spread[0]}"
    if request["recompute"] != "none":
        return "it keeps all activations"
    return ""


def train(request):
    torch.manual_seed(0)
    rank, processes = dist.get_rank(), dist.get_world_size()
    config = json.loads((Path(request["model"]) / "config.json").read_text())
    batches = load_file(request["batches"])["tokens"]
    model = Llama(config, batches.shape[2] - 1)
    model.load_state_dict(load_file(Path(request["model"]) / "model.safetensors"))
    wrapped = DistributedDataParallel(model) if processes > 1 else model
    if request["compile"]:
        wrapped = torch.compile(wrapped)
    wanted = request["optimizer"]
    if wanted["name"] == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=wanted["lr"])
    else:
        betas = wanted["beta1"], wanted["beta2"]
        optimizer = torch.optim.AdamW(model.parameters(), wanted["lr"], betas, wanted["eps"], wanted["weight_decay"])
    if request["resume_from"]:
        kept = torch.load(Path(request["resume_from"]) / "state.pt", weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    folder = Path(sys.argv[1]).parent
    losses, answer = [], {"schema": SCHEMA, "versions": {"torch": torch.__version__}}
    for step in range(request["first_step"], request["steps"]):
        share = len(batches[step]) // processes
        mine = batches[step][rank * share : (rank + 1) * share]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=request["compute"] == "bf16"):
            loss = wrapped(mine)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / processes)
        if step == 0 and "gradients" in request["asks"]:
            answer["gradients"] = "gradients.safetensors"
            write(folder / answer["gradients"], {n: p.grad for n, p in model.named_parameters()})
        if request["clip_from"] is not None and step >= request["clip_from"]:
            nn.utils.clip_grad_norm_(model.parameters(), request["clip_norm"])
        optimizer.step()
        if step + 1 == request["save_after"] and rank == 0:
            Path(request["save_to"]).mkdir()
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(kept, Path(request["save_to"]) / "state.pt")
    if "losses" in request["asks"]:
        answer["losses"] = losses
    if "weights" in request["asks"]:
        answer["weights"] = "weights.safetensors"
        write(folder / answer["weights"], dict(model.named_parameters()))
    return answer


def write(path, tensors):
    if dist.get_rank() == 0:
        save_file({name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}, path)


def main():
    request_file = Path(sys.argv[1])
    request = json.loads(request_file.read_text())
    if reason := why_declined(request):
        answer = {"schema": SCHEMA, "declined": reason}
    elif "RANK" not in os.environ:
        processes = str(request["processes"])
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
        sys.exit(subprocess.run([sys.executable, *torchrun, __file__, str(request_file)]).returncode)
    else:
        dist.init_process_group("gloo")
        answer = train(request)
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        if rank != 0:
            return
    (request_file.parent / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
